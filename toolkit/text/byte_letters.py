"""The letters in which byte-level vocabularies spell bytes (GPT-2's table)."""

from __future__ import annotations


def _byte_letters() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in shown}
    letters.update({chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(shown)))})
    return letters


BYTE_LETTERS = _byte_letters()
"""Byte by letter, all 256 of them."""


def bytes_of(spelling: str) -> bytes:
    """Return the bytes of a token, as the library's ByteLevel decoder reads its spelling: one that has other letters (a
    token that was added) stands for itself.
    """
    try:
        return bytes([BYTE_LETTERS[letter] for letter in spelling])
    except KeyError:
        return spelling.encode()
