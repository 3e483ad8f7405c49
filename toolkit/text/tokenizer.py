"""A tokenizer loaded from a model directory, with no torch and no transformers.

Encodes, decodes and renders chats as transformers' AutoTokenizer does for the same directory, in a process that stays
small. The work is done by the `tokenizers` library; this module reads the files around tokenizer.json as transformers
reads them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as _Backend

from pegboard.core.interfaces.errors import InvalidRequest, ModelError
from pegboard.toolkit.chat.chat_template import ChatTemplate, ChatTemplates
from pegboard.toolkit.model.hf_files import eos_token_ids as model_eos_token_ids
from pegboard.toolkit.model.hf_files import read_json_object
from pegboard.toolkit.text.byte_letters import bytes_of

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_LONG_IDS = 1024
# One text after the other: the model needs the cores more, and a fork does not warn of threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Text to token ids and back, special tokens, and the model's chat template (`pegboard.core.interfaces.Tokenizer`).

    Build it with `from_directory`. Every method is thread-safe. Ids are Python ints.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        named_tokens: Mapping[str, str],
        extra_special_tokens: Sequence[str] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        templates: Mapping[str, str] | None = None,
        model_max_length: int | None = None,
    ) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._named = dict(named_tokens)
        self.model_max_length = model_max_length
        """Tokens that the tokenizer's own config allows, or None; the model's config has the last word."""
        self._literal = _without_added_tokens(backend)
        self._templates = ChatTemplates(templates or {})
        special = [*self._named.values(), *extra_special_tokens]
        if special:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self._added = frozenset(backend.get_added_tokens_decoder())
        eos = backend.token_to_id(self._named["eos_token"]) if "eos_token" in self._named else None
        self.eos_token_ids = eos_token_ids if eos is None else eos_token_ids | {eos}
        """Every id that ends an answer: from generation_config.json, config.json and the tokenizer's eos_token."""
        self.token_bytes = _TokenBytes(self.id_to_token) if _is_byte_level(backend) else None
        """What each token adds to a text, by id: UTF-8, or part of a character, and nothing for an unknown id. None for
        tokenizers whose texts are not their tokens' bytes in a row.
        """
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, added ones included. The model's logits may be wider (padding)."""

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Return the tokenizer of a model directory in Hugging Face's layout.

        Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json,
        chat_template.json and chat_template.jinja. As in transformers, tokenizer.json alone says what surrounds a plain
        prompt: add_bos_token and add_eos_token of the config have no effect beside it. Raises ModelError where
        tokenizer.json is missing or broken.
        """
        path = Path(directory)
        file = _tokenizer_file(path)
        config = {
            **read_json_object(path / "special_tokens_map.json"),
            **read_json_object(path / "tokenizer_config.json"),
        }
        backend = _read_backend(file)
        eos_token_ids = model_eos_token_ids(path)
        try:
            _add_declared_tokens(backend, config)
            named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
            extra, templates = _extra_special(config), _read_templates(path, config)
        except OSError as error:
            raise ModelError(f"{error.filename}: a chat template cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ModelError(
                f"{path / 'tokenizer_config.json'} does not describe a tokenizer: its added_tokens_decoder, special "
                f"tokens or chat_template hold values of another type ({type(error).__name__}: {error})"
            ) from error
        length = config.get("model_max_length")
        return cls(
            backend,
            named_tokens=named,
            extra_special_tokens=extra,
            eos_token_ids=eos_token_ids,
            templates=templates,
            model_max_length=int(length) if isinstance(length, int | float) and 0 < length < 1e12 else None,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of `text`; special tokens written in the text are recognised, as transformers does.

        `add_special_tokens` adds what the model wants around a plain prompt (a bos token, say). Raises InvalidRequest
        for text that is not valid Unicode (lone surrogates). Other threads run meanwhile: `encode_batch_fast` gives
        back the interpreter's lock, which the library's `encode` keeps, and leaves out offsets, which have no use here.
        """
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_literal(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing that spells an added token, special or not, is one. Raises as
        `encode` does.
        """
        found = _ids(self._literal, text, add_special_tokens=False)
        if self._added.isdisjoint(found):
            return found
        # Some vocabularies have added tokens in them, which only single characters cannot spell.
        return [one for char in text for one in _ids(self._literal, char, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return text of `ids`. Ids that the tokenizer does not know are left out; invalid UTF-8 becomes U+FFFD."""
        if len(ids) > _LONG_IDS:
            # As in `encode`: other threads run meanwhile.
            return self.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode_batch(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """`decode` of each sequence, in parallel inside the library."""
        return list(self._backend.decode_batch([list(ids) for ids in sequences], skip_special_tokens))

    def to_json(self) -> str:
        """Return the whole tokenizer as tokenizer.json spells one, tokens included that only other files declare."""
        return str(self._backend.to_str())

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it (byte-level spelling, not text); None for an unknown id."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None where there is none."""
        return self._backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work at all."""
        return bool(self._templates.names)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Sources of the chat templates by name, "default" first."""
        return self._templates.sources

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of `bos_token`, `eos_token` and so on, which templates read by these names."""
        return self._named

    def chat_template(self, *, name: str | None = None, with_tools: bool = False) -> ChatTemplate:
        """Return the template that a chat would use. Raises ChatTemplateError where there is none."""
        return self._templates.select(name=name, with_tools=with_tools)

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return this tokenizer with one other chat template. Raises ChatTemplateError where that is broken."""
        changed = copy.copy(self)
        changed._templates = ChatTemplates({"default": source})
        changed.chat_template()
        return changed

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: object,
    ) -> str:
        """Return the conversation as the prompt text that the model was trained on; encode it without adding special
        tokens.

        `messages` are OpenAI-style dicts, `tools` JSON schemas, `template` names one of several templates, `kwargs` are
        further names that the template reads (``enable_thinking=False``). `continue_final_message` leaves the last
        message open instead of beginning an answer. Raises ChatTemplateError, an InvalidRequest.
        """
        chosen = self._templates.select(name=template, with_tools=bool(tools))
        return chosen.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self._named, **kwargs},
        )


class _TokenBytes(dict[int, bytes]):
    """Bytes by token id, worked out where they are first asked for."""

    def __init__(self, id_to_token: Callable[[int], str | None]) -> None:
        super().__init__()
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> bytes:
        spelling = self._id_to_token(token_id)
        if spelling is None:
            return b""
        found = self[token_id] = bytes_of(spelling)
        return found


def _ids(backend: _Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        [found] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequest("the text holds lone surrogates, which are not valid Unicode", param="prompt") from error


def _without_added_tokens(backend: _Backend) -> _Backend:
    """Return a tokenizer with the same vocabulary, which it shares, and no added tokens."""
    plain = _Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _tokenizer_file(directory: Path) -> Path:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json. Pegboard reads the fast tokenizer format only; transformers writes it "
            f"with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return file


def _read_backend(file: Path) -> _Backend:
    try:
        return _Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file} cannot be read as a tokenizer: {error}") from error


def _is_byte_level(backend: _Backend) -> bool:
    """Return whether the decoder does nothing but read bytes spelled in letters, as far as its own tokens show it."""
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return False
    return all(
        backend.decode([token], skip_special_tokens=False) == bytes_of(added.content).decode(errors="replace")
        for token, added in backend.get_added_tokens_decoder().items()
    )


def _token_text(value: object) -> str | None:
    """Return a token as configs write it: a string, or a serialised AddedToken."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _extra_special(config: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        items = value.values() if isinstance(value, dict) else value
        found += [text for item in items if (text := _token_text(item)) is not None]
    return found


def _add_declared_tokens(backend: _Backend, config: Mapping[str, Any]) -> None:
    """Add tokens of `added_tokens_decoder` that tokenizer.json lacks, in the order of their ids."""
    declared = config.get("added_tokens_decoder") or {}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, spec in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _token_text(spec)
        if text is None or text in known:
            continue
        flags = {key: bool(spec[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in spec}
        backend.add_tokens([AddedToken(text, special=bool(spec.get("special", False)), **flags)])


def _read_templates(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name: from tokenizer_config.json, overridden by chat_template.json, which processors had up to
    transformers 4.51, and by *.jinja files.
    """
    templates = _named_templates(config.get("chat_template"))
    templates |= _named_templates(read_json_object(path / "chat_template.json").get("chat_template"))
    single = path / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _named_templates(value: object) -> dict[str, str]:
    """Return templates as a text, a list of named ones or a mapping says."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(item["name"]): str(item["template"]) for item in value}
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}
