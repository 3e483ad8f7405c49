"""Tokens one by one: together they are the text, byte for byte, whatever the vocabulary spells them in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.toolkit.text.token_text import Offsets, TokenTexts
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.toolkit.text.demo import STRINGS


def sentencepiece() -> Tokenizer:
    """Like Llama 2's: spaces are spelled U+2581, unknown characters in bytes, and the first space is dropped."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdefghij",
        "ab",
        "\u2581a",
    ]
    backend = Backend(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            [("a", "b"), ("\u2581", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(directory)
    return Tokenizer.from_directory(directory)


def joined(tokenizer: Tokenizer, text: str) -> bytes:
    texts = TokenTexts(tokenizer)
    return b"".join(texts.raw(token) for token in tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", STRINGS)
def test_byte_level_vocabularies(byte_level: Tokenizer, text: str) -> None:
    assert joined(byte_level, text) == text.encode()


@pytest.mark.parametrize("text", ["ab a j", " ab", "caf\u00e9 \U0001f642", "<0x41>", "a\nb"])
def test_sentencepiece_vocabularies(text: str) -> None:
    """The decoder drops the space that its normaliser has put there, and so the word's own: here both are seen."""
    assert joined(sentencepiece(), text) == b" " + text.encode()


@given(text=st.text())
def test_any_text_in_bytes(text: str) -> None:
    assert joined(sentencepiece(), text) == (b" " + text.encode() if text else b"")


def test_parts_of_a_character_are_written_as_bytes(byte_level: Tokenizer) -> None:
    texts = TokenTexts(byte_level)
    tokens = byte_level.encode("\U0001f642", add_special_tokens=False)
    assert len(tokens) > 1
    shown = [texts.text(token) for token in tokens]
    assert shown[0].startswith("bytes:\\xf0")
    assert len(set(shown)) == len(shown), "so that two of them differ"


def test_special_and_unknown_tokens(byte_level: Tokenizer) -> None:
    texts = TokenTexts(byte_level)
    assert texts.text(1) == "<|im_start|>"
    assert texts.is_special(1)
    assert texts.raw(10**6) == b""
    assert texts.text(10**6) == ""


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_are_places_in_the_text(byte_level: Tokenizer, skip: bool) -> None:
    text = "na\u00efve <|im_start|>\U0001f642 x"
    tokens = byte_level.encode(text, add_special_tokens=False)
    whole = byte_level.decode(tokens, skip_special_tokens=skip)
    offsets = Offsets(TokenTexts(byte_level), skip_special_tokens=skip)
    texts = TokenTexts(byte_level)
    for token in tokens:
        at, shown = offsets.next(token), texts.text(token)
        if not shown.startswith("bytes:") and not (skip and texts.is_special(token)):
            assert whole[at : at + len(shown)] == shown
    assert offsets.next(tokens[0]) == len(whole)
