"""Tiny random checkpoints in Hugging Face's layout, with a tokenizer and a chat template, for tests that need a model.

A checkpoint builds in well under a second once transformers is imported, has about 150,000 parameters and can be
served: its byte-level tokenizer round-trips any text. transformers and torch are imported when a checkpoint is built,
not before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gpt_neox", "deepseek_v3", "bamba",
)  # fmt: skip
"""The names that `tiny_checkpoint` takes."""

VOCAB_SIZE = 320
"""Tokens of the tiny tokenizer: three special ones, 256 bytes, and merges."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dogs there were thinking that this is the end",
    "a server answers requests: a prompt goes in, tokens come out, and the cache keeps what it has seen before",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
    "user assistant system message content role question answer please tell me about the weather in the north",
)

_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "gemma2": "Gemma2",
    "gpt_neox": "GPTNeoX",
    "deepseek_v3": "DeepseekV3",
    "bamba": "Bamba",
}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_PER_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 32},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 1.0,
    },
    "bamba": {
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [1],
    },
}


def tiny_checkpoint(
    directory: str | os.PathLike[str],
    architecture: str,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Return a random float32 checkpoint of `architecture`, in a folder of its own under `directory`.

    `overrides` are fields of the architecture's transformers config (``sliding_window=8``, ``num_hidden_layers=1``);
    `max_shard_size` below the total ("100KB") makes a sharded checkpoint. Weights are drawn with standard deviation
    0.2, so that greedy tokens vary and near-ties are rare; biases and norms are random too, so that ignoring one shows.

    The folder's name is a digest of all arguments, and it appears by one rename: a second call, in this or another
    process, returns what the first one built. Raises ValueError for an unknown architecture.
    """
    if architecture not in _CLASSES:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    settings = {**_COMMON, **_PER_ARCHITECTURE[architecture], **overrides}
    identity = json.dumps([architecture, seed, max_shard_size, settings], sort_keys=True, default=str)
    name = f"{architecture}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def build(scratch: Path) -> None:
        _save_model(scratch, _CLASSES[architecture], settings, seed, max_shard_size)
        write_tiny_tokenizer(scratch)

    return built_once(Path(directory) / name, build)


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, a folder that `build` fills where it is not there yet.

    It is filled under another name and appears by one rename, so that other processes see all of it or nothing.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_tiny_tokenizer(
    directory: Path,
    chat_template: str | None = _CHAT_TEMPLATE,
    *,
    more_special: Sequence[str] = (),
    vocab_size: int = VOCAB_SIZE,
) -> None:
    """Write tokenizer.json and tokenizer_config.json of the byte-level tokenizer of `vocab_size` tokens.

    Ids 0, 1, 2 are <|endoftext|> (bos, pad), <|im_start|> and <|im_end|> (eos), and `more_special` follow.
    `chat_template` None leaves it out, as base models do. Note that transformers' AutoTokenizer puts its own
    pre-tokenizer in front of any "qwen2" model, so compare token ids with it rather than text there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*_SPECIAL, *more_special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "additional_special_tokens": [_SPECIAL[1], *more_special],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _COMMON["max_position_embeddings"],
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _save_model(directory: Path, prefix: str, settings: Mapping[str, Any], seed: int, max_shard_size: str) -> None:
    import torch
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32).eval()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.dim() == 1:
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
