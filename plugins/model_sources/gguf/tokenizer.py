"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json.

GGUF names a pre-tokenizer instead of describing one; the table here says what each name stands for, as llama.cpp's
`llm_tokenizer_bpe` does, in the spelling of the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_sources.gguf.metadata import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_GPT2 = ("gpt-2", "gpt2", "default")
_LLAMA = ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "pixtral")
_QWEN = ("qwen2", "deepseek-r1-qwen", "megrez")


def write_tokenizer(file: GGUFFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ModelError for a tokenizer that is not supported."""
    kind = file.need("tokenizer.ggml.model", str)
    tokens = file.need("tokenizer.ggml.tokens", list)
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelError(f"{file.path}: GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_special(tokenizer, tokens, file.get("tokenizer.ggml.token_type") or [])
    _add_post_processor(file, tokenizer, tokens, default_bos=kind == "llama")
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    text = json.dumps(_tokenizer_config(file, tokens), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json: the ids that begin, end and pad. A separate end-of-turn token also ends an answer."""
    config: dict[str, Any] = {}
    bos, eos, eot, pad = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding"))
    if bos is not None:
        config["bos_token_id"] = int(bos)
    ends = sorted({int(token) for token in (eos, eot) if token is not None})
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if pad is not None:
        config["pad_token_id"] = int(pad)
    return config


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges", list)]
    pre = file.get("tokenizer.ggml.pre") or "default"
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        tokenizer.pre_tokenizer = whole
    elif pre in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    elif pre in _LLAMA or pre in _QWEN:
        split = pre_tokenizers.Split(Regex(_LLAMA3 if pre in _LLAMA else _QWEN2), behavior="isolated")
        after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, after])
        if pre in _QWEN:
            tokenizer.normalizer = normalizers.NFC()
    else:
        known = ", ".join((*_GPT2, *_DIGITS, *_LLAMA, *_QWEN))
        raise ModelError(f"{file.path}: GGUF pre-tokenizer {pre!r} is not supported; supported: {known}")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE with byte fallback, laid out as Llama 2's tokenizer.json."""
    scores = file.need("tokenizer.ggml.scores", list)
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges_of(tokens, scores),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    prefix = file.get("tokenizer.ggml.add_space_prefix") is not False
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece vocabulary implies.

    SentencePiece merges the adjacent pair whose union has the best score, so every way to cut a piece into two pieces
    is a merge, ranked by the score of the whole (the algorithm of transformers' converter, `generate_merges`).
    """
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], (left, right)))
    merges.sort()
    return [pair for *_, pair in merges]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    kinds = list(zip(tokens, types, strict=bool(types)))
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_post_processor(file: GGUFFile, tokenizer: Tokenizer, tokens: Sequence[str], *, default_bos: bool) -> None:
    add_bos = file.get("tokenizer.ggml.add_bos_token")
    ends: list[tuple[str, int]] = []
    parts = ["$A"]
    bos, eos = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    if bos is not None and (default_bos if add_bos is None else add_bos):
        ends.append((tokens[bos], int(bos)))
        parts.insert(0, tokens[bos])
    if eos is not None and file.get("tokenizer.ggml.add_eos_token"):
        ends.append((tokens[eos], int(eos)))
        parts.append(tokens[eos])
    if ends:
        pair = [*parts, *(part.replace("$A", "$B:1") for part in parts)]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, pair=pair, special_tokens=ends)


def _tokenizer_config(file: GGUFFile, tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.need_int("context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = file.get("tokenizer.chat_template")
    named = {name: file.get(f"tokenizer.chat_template.{name}") for name in file.get("tokenizer.chat_templates") or []}
    if named:
        templates = {"default": template, **named}
        config["chat_template"] = [{"name": n, "template": text} for n, text in templates.items() if text]
    elif template:
        config["chat_template"] = template
    return config
