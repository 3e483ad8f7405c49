"""For APIs: bytes and text of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from pegboard.toolkit.text.byte_letters import BYTE_LETTERS

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""How SentencePiece spells a space."""
_MOST = 1 << 16


class TokenSpeller(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class TokenTexts:
    """What each token of a vocabulary stands for, in the middle of a text.

    A decoder shows part of a character as U+FFFD, and SentencePiece's drops the space before a text's first word; the
    vocabulary's spelling has both. Whether it is spelled in bytes is seen token by token, by what the decoder makes of
    it. Remembers what it has worked out, within bounds.
    """

    def __init__(self, tokenizer: TokenSpeller) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def raw(self, token_id: int) -> bytes:
        """Return the token's bytes, UTF-8 or part of it; none for an id that the vocabulary does not know."""
        known = self._known.get(token_id)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[token_id] = self._spelled(token_id)
        return known

    def text(self, token_id: int) -> str:
        r"""Return the token as text. As OpenAI's: where it is part of a character, ``bytes:\xe2\x80``."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token_id: int) -> bool:
        """Return whether it leaves no trace in a text from which special tokens are skipped."""
        return token_id in self._tokenizer.special_ids

    def _spelled(self, token_id: int) -> bytes:
        spelling = self._tokenizer.id_to_token(token_id)
        if spelling is None:
            return b""
        if token_id in self._tokenizer.special_ids:
            return spelling.encode()
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if (byte := _BYTE.fullmatch(spelling)) and text != spelling:
            return bytes([int(byte[1], 16)])
        if all(letter in BYTE_LETTERS for letter in spelling):
            raw = bytes(BYTE_LETTERS[letter] for letter in spelling)
            if raw.decode(errors="replace") == text:
                return raw
        spaced = spelling.replace(_SPACE, " ")
        return (spaced if _SPACE in spelling and spaced.lstrip(" ") == text.lstrip(" ") else text).encode()


class Offsets:
    """Where tokens begin in a text, in characters. Feed it the tokens in order; special ones, where they are skipped,
    take no room, and part of a character none until it is whole.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._texts = texts
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token_id: int) -> int:
        """Return the offset at which this token begins."""
        at = self._at
        if not (self._skip and self._texts.is_special(token_id)):
            self._at += len(self._decoder.decode(self._texts.raw(token_id)))
        return at
