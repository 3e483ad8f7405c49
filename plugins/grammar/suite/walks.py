"""Walks through a grammar: along the tokens of a text, and at random."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.plugins.grammar.suite.cases import EOS, WIDTH
from pegboard.toolkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.grammar.api import CompiledGrammar, GrammarMatcher

GARBAGE = 0x5A5A5A5A
"""What stands in a mask before it is filled."""

PATIENCE = 400
"""Most tokens of a random walk."""

_CLOSING = frozenset({b'"', b"]", b"}", b">"})


def row_of(matcher: GrammarMatcher) -> NDArray[np.bool_]:
    """Return which tokens may come next, bool [WIDTH]."""
    mask = np.full((1, WIDTH // 32), GARBAGE, np.int32)
    if not matcher.fill(mask, 0):
        return np.ones(WIDTH, np.bool_)
    return np.unpackbits(mask[0].view(np.uint8), bitorder="little").astype(np.bool_)


def walked(compiled: CompiledGrammar, path: Sequence[int]) -> GrammarMatcher:
    """Return a new matcher after these tokens."""
    matcher = compiled.matcher()
    for token in path:
        assert matcher.accept(token), f"token {token} is not accepted on the way {list(path)}"
    return matcher


def bits(compiled: CompiledGrammar, path: Sequence[int]) -> NDArray[np.bool_]:
    return row_of(walked(compiled, path))


def random_walk(compiled: CompiledGrammar, rng: random.Random) -> tuple[list[int], bool]:
    """Return tokens chosen at random among those that the masks name, and whether the end was reached."""
    matcher = compiled.matcher()
    tokens: list[int] = []
    while len(tokens) < PATIENCE:
        allowed = np.flatnonzero(row_of(matcher)).tolist()
        assert allowed, f"nothing may follow {tokens}, not even the end"
        # What closes something is preferred now and then, or strings would go on for ever.
        token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed)
        closing = [one for one in allowed if bytes_of(one) in _CLOSING]
        if closing and rng.random() < 0.3:
            token = rng.choice(closing)
        assert matcher.accept(token), f"token {token} is in the mask after {tokens}, but not accepted"
        if token == EOS:
            return tokens, True
        tokens.append(token)
    return tokens, False


def spelling(compiled: CompiledGrammar, rest: bytes, path: list[int]) -> list[int] | None:
    """Return the way from `path` through the masks to the end of `rest`, the longest tokens first."""
    allowed = np.flatnonzero(bits(compiled, path)).tolist()
    if not rest:
        return path if EOS in allowed else None
    fitting = [token for token in allowed if token > EOS and rest.startswith(bytes_of(token))]
    for token in sorted(fitting, key=lambda one: -len(bytes_of(one))):
        found = spelling(compiled, rest[len(bytes_of(token)) :], [*path, token])
        if found is not None:
            return found
    return None


@lru_cache
def _vocabulary() -> dict[int, bytes]:
    """Return the bytes of each token of the tiny tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_tokenizer(Path(directory))
        tokenizer = Tokenizer.from_directory(directory)
    spelled = {char: byte for byte, char in enumerate(_byte_alphabet())}
    return {
        token: bytes(spelled[char] for char in tokenizer.id_to_token(token) or "")
        for token in range(EOS + 1, tokenizer.vocab_size)
    }


def bytes_of(token: int) -> bytes:
    """Return what a token spells; nothing for one that is special or beyond the vocabulary."""
    return _vocabulary().get(token, b"")


def spelled_otherwise(token: int, allowed: NDArray[np.bool_]) -> bool:
    """Return whether tokens that may come next begin the text of this one, or have it as their beginning."""
    text = bytes_of(token)
    others = [bytes_of(one) for one in np.flatnonzero(allowed).tolist() if one > EOS]
    return bool(text) and any(text.startswith(one) or one.startswith(text) for one in others)


def _byte_alphabet() -> list[str]:
    """Return how byte-level vocabularies spell the bytes 0 to 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]
