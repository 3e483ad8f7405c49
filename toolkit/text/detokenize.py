"""Text from tokens as they arrive, without cutting a character in two."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) UTF-8."""

_MAX_CHAR_TOKENS = 4
"""A character has at most four UTF-8 bytes and a token at least one, so no character spans more tokens than this."""

_TRIM_ABOVE = 24
_KEEP = 8


class TokenDecoder(Protocol):
    """What the detokenizer needs of a tokenizer. One whose texts are its tokens' bytes in a row may have them as
    `token_bytes`, by id, and nothing for unknown ids: then nothing is decoded twice.
    """

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class IncrementalDetokenizer:
    """Turns one output's tokens into text piece by piece.

    The pieces of all `push` calls and the last `flush` together are ``decode(all ids)``, however the ids were cut. Text
    that ends in an unfinished character is held back until the character is whole or can no longer become so; hence a
    piece holds U+FFFD only where the text itself has invalid bytes. (One exception, for decoders with byte fallback:
    they turn a whole run of byte tokens into U+FFFD once any byte of it is invalid, also those already sent.)

    Where the tokenizer knows its tokens' bytes, the new ones are all that is looked at. Elsewhere a window of at most
    a few dozen tokens is decoded per call, so the cost per token does not grow with the output.
    The window also gives decoders that treat a text's first token differently (SentencePiece drops its space) the
    context they need. The idea of decoding an overlapping window is that of vLLM's and TGI's offset pairs.

    Some decoders (WordPiece, or none at all) write a space between tokens. Without `spaces_between_special_tokens`
    there is none between a special token and one after it, as in vLLM; transformers no longer takes any notice.
    """

    def __init__(
        self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        joins = not (skip_special_tokens or spaces_between_special_tokens)
        self._joined = tokenizer.special_ids if joins else frozenset()
        self._bytes: Mapping[int, bytes] | None = None if joins else getattr(tokenizer, "token_bytes", None)
        self._tail = b""
        """The beginning of a character, where bytes are known."""
        self._window: list[int] = []
        self._emitted = 0
        """Characters of the window's text that have been returned."""

    def push(self, ids: Iterable[int]) -> str:
        """Return text that has become certain with these tokens; "" where everything has to wait."""
        if self._bytes is not None:
            return self._push_bytes(self._bytes, ids)
        kept = [i for i in ids if i not in self._skip and self._tokenizer.id_to_token(i) is not None]
        if not kept:
            return ""
        self._window += kept
        text = self._decode(self._window)
        certain, undecided = self._certain(text)
        piece = certain[self._emitted :]
        self._emitted += len(piece)
        if len(self._window) > _TRIM_ABOVE:
            self._trim(certain if undecided else text, undecided)
        return piece

    def flush(self) -> str:
        """Return what was held back, at the end of the output. The object then starts a new text."""
        if self._bytes is not None:
            tail, self._tail = self._tail, b""
            return utf_8_decode(tail, "replace", True)[0]
        piece = self._decode(self._window)[self._emitted :]
        self._window.clear()
        self._emitted = 0
        return piece

    def _push_bytes(self, known: Mapping[int, bytes], ids: Iterable[int]) -> str:
        data = self._tail + b"".join([known[token] for token in ids if token not in self._skip])
        text, used = utf_8_decode(data, "replace")
        self._tail = data[used:]
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text if self._joined.isdisjoint(ids) else self._join(text, ids)

    def _join(self, text: str, ids: Sequence[int]) -> str:
        """Return the text of `ids` without what the decoder writes between special tokens."""
        joined, end = "", 0
        for place in range(1, len(ids)):
            if ids[place - 1] in self._joined and ids[place] in self._joined:
                start = len(self._tokenizer.decode(ids[:place], skip_special_tokens=False))
                joined += text[end:start] + (self._tokenizer.id_to_token(ids[place]) or "")
                end = len(self._tokenizer.decode(ids[: place + 1], skip_special_tokens=False))
        return joined + text[end:]

    def _certain(self, text: str) -> tuple[str, int]:
        """Return the beginning of the window's text that no later token can change, and how many tokens after it may
        still become a character.
        """
        if not text.endswith(REPLACEMENT):
            return text, 0
        for held in range(1, min(_MAX_CHAR_TOKENS, len(self._window) + 1)):
            shorter = self._decode(self._window[:-held])
            if not shorter.endswith(REPLACEMENT):
                return shorter, held
        # More bytes than one character can have: the text is invalid, and only its last few bytes are undecided.
        trailing = len(text) - len(text.rstrip(REPLACEMENT))
        return text[: len(text) - min(trailing, _MAX_CHAR_TOKENS - 1)], 0

    def _trim(self, text: str, undecided: int) -> None:
        """Forget old tokens at a point where the rest decodes as it did with them.

        `text` is that of the window without its last `undecided` tokens. With them, a decoder with byte fallback
        shows a whole run of bytes as U+FFFD, and then any cut looks right, also one through a character.
        """
        decided = self._window[: len(self._window) - undecided]
        pending = len(text) - self._emitted
        for keep in range(_KEEP, _KEEP + _MAX_CHAR_TOKENS):
            tail = self._decode(decided[-keep:])
            if tail and len(tail) >= pending and text.endswith(tail):
                del self._window[: len(decided) - keep]
                self._emitted = len(tail) - pending
                return
