"""Pieces add up to the whole text, and no character is ever cut."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.toolkit.text.detokenize import REPLACEMENT, IncrementalDetokenizer
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.toolkit.text.demo import STRINGS


@functools.cache
def tiny(directory: Path) -> Tokenizer:
    write_tiny_tokenizer(directory)
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module", params=["bytes", "window"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny one, as it is and as one that does not know its tokens' bytes."""
    made = tiny(tmp_path_factory.mktemp(f"tokenizer-{request.param}"))
    assert made.token_bytes is not None
    if request.param == "window":
        made.token_bytes = None
    return made


@functools.cache
def sentencepiece() -> Tokenizer:
    """Llama 2's decoder over a handful of tokens and all bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁end", "ing", "a", "漢"]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend, named_tokens={"unk_token": "<unk>"})


def pieces(tokenizer: Tokenizer, cuts: Iterable[Sequence[int]], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(part) for part in cuts), detokenizer.flush()]


def cut(ids: Sequence[int], lengths: Iterable[int]) -> list[Sequence[int]]:
    parts, start = [], 0
    for length in lengths:
        parts.append(ids[start : start + length])
        start += length
    return [*parts, ids[start:]]


LENGTHS = st.lists(st.integers(0, 9), max_size=60)
ANY_IDS = st.lists(st.integers(0, 340), max_size=150)
"""Any tokens of the tiny vocabulary, most of them single bytes, special ones and a few that do not exist."""


@given(ids=ANY_IDS, lengths=LENGTHS, skip=st.booleans())
def test_pieces_of_any_tokens_add_up(tokenizer: Tokenizer, ids: list[int], lengths: list[int], skip: bool) -> None:
    out = pieces(tokenizer, cut(ids, lengths), skip=skip)
    assert "".join(out) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60).filter(lambda text: REPLACEMENT not in text), lengths=LENGTHS)
def test_valid_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str, lengths: list[int]) -> None:
    out = pieces(tokenizer, cut(tokenizer.encode(text, add_special_tokens=False), lengths), skip=False)
    assert "".join(out) == text
    assert not any(REPLACEMENT in piece for piece in out)


@given(ids=ANY_IDS)
def test_invalid_text_shows_no_more_replacements_than_it_has(tokenizer: Tokenizer, ids: list[int]) -> None:
    out = "".join(pieces(tokenizer, [[token] for token in ids]))
    assert out.count(REPLACEMENT) == tokenizer.decode(ids).count(REPLACEMENT)


@pytest.mark.parametrize("text", STRINGS)
def test_known_strings_token_by_token(tokenizer: Tokenizer, text: str) -> None:
    out = pieces(tokenizer, [[token] for token in tokenizer.encode(text)], skip=False)
    assert "".join(out) == text


@example(text="aaaaaaaaa🙂a🙂🙂🙂", lengths=[8, 9, 9])
@example(text="🙂" * 40, lengths=[1, *[4] * 39])
@given(text=st.text("the end ing a漢🙂é", max_size=40), lengths=LENGTHS)
def test_byte_fallback_and_prefix_spaces(text: str, lengths: list[int]) -> None:
    tokenizer = sentencepiece()
    words = {"▁the": " the", "▁end": " end", "ing": "ing", "a": "a", "漢": "漢", "▁": " "}
    ids = [0]
    for char in text:
        known = next((token for token, shown in words.items() if shown == char), None)
        ids += [tokenizer.token_to_id(known) or 0] if known else [byte + 1 for byte in char.encode()]
        if char == "t":
            ids.append(tokenizer.token_to_id("▁the") or 0)
    out = pieces(tokenizer, cut(ids, lengths))
    assert "".join(out) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in piece for piece in out)


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂!", add_special_tokens=False)
    assert pieces(tokenizer, [[token] for token in ids]) == ["", "", "", "🙂", "!", ""]


def test_garbage_is_not_held_back_forever(tokenizer: Tokenizer) -> None:
    lone = tokenizer.encode("é", add_special_tokens=False)[0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = "".join(detokenizer.push([lone]) for _ in range(1000))
    assert len(shown) >= 996
    assert shown + detokenizer.flush() == REPLACEMENT * 1000


def test_cost_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    decoded = 0

    class Counting:
        special_ids: frozenset[int] = frozenset()

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        def id_to_token(self, token_id: int) -> str | None:
            return tokenizer.id_to_token(token_id)

    for text in ("some words " * 500, "漢字" * 500, "🙂" * 500):
        decoded = 0
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(Counting())
        assert "".join(detokenizer.push([token]) for token in ids) == text
        assert decoded < 100 * len(ids)


@pytest.mark.parametrize("text", ["漢字 🙂", "abc"])
def test_known_bytes_are_not_decoded_again(text: str, tmp_path: Path) -> None:
    known = tiny(tmp_path)

    class Silent:
        special_ids: frozenset[int] = frozenset()
        token_bytes = known.token_bytes

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            raise AssertionError

        def id_to_token(self, token_id: int) -> str | None:
            raise AssertionError

    ids = known.encode(text, add_special_tokens=False)
    assert "".join(pieces(Silent(), [[token] for token in ids])) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["<|end|>", "<｜end▁of｜>", "<é>", "< end >", "Ġ", "\u0120x"])  # noqa: RUF001
def test_bytes_of_added_tokens_are_the_decoders(content: str) -> None:
    """Some would be read as bytes spelled in letters, and others as they stand."""
    backend = Backend(models.BPE(vocab={"a": 0, "Ġ": 1, "Ã": 2, "©": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, named_tokens={"eos_token": content})
    (special,) = tokenizer.special_ids
    for ids in ([special], [0, special, 1], [2, special, 3], [2, 3, 99, special], [special] * 3):
        for skip in (True, False):
            out = pieces(tokenizer, [[token] for token in ids], skip=skip)
            assert "".join(out) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_only_byte_level_decoders_have_bytes() -> None:
    assert sentencepiece().token_bytes is None
    assert spaced().token_bytes is None


def test_flush_begins_a_new_text(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    first = detokenizer.push(tokenizer.encode("one")) + detokenizer.flush()
    second = detokenizer.push(tokenizer.encode(" two")) + detokenizer.flush()
    assert (first, second) == ("one", " two")


@functools.cache
def spaced() -> Tokenizer:
    """Without a decoder, the library writes a space between any two tokens."""
    tokens = ["<unk>", "<s>", "<e>", "a", "bc", "d"]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.add_special_tokens(tokens[:3])
    return Tokenizer(backend, named_tokens={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<e>"})


def written(ids: Sequence[int], special: frozenset[int], tokens: Sequence[str]) -> str:
    """Each token behind a space, but for a special one behind a special one."""
    text = ""
    for place, token in enumerate(ids):
        joined = place == 0 or (token in special and ids[place - 1] in special)
        text += ("" if joined else " ") + tokens[token]
    return text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=80), lengths=LENGTHS)
def test_spaces_between_special_tokens(ids: list[int], lengths: list[int]) -> None:
    tokenizer = spaced()
    special, tokens = tokenizer.special_ids, ["<unk>", "<s>", "<e>", "a", "bc", "d"]
    assert special == {0, 1, 2}

    def text(**more: bool) -> str:
        detokenizer = IncrementalDetokenizer(tokenizer, **more)
        return "".join(detokenizer.push(part) for part in cut(ids, lengths)) + detokenizer.flush()

    joined = text(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == written(ids, special, tokens)
    assert text(skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    # Where special tokens are left out there is nothing between them.
    assert text(spaces_between_special_tokens=False) == text() == tokenizer.decode(ids)


@settings(deadline=None)
@given(ids=ANY_IDS, lengths=LENGTHS)
def test_tokenizers_that_write_no_spaces_have_none_to_leave_out(
    tokenizer: Tokenizer, ids: list[int], lengths: list[int]
) -> None:
    """As nearly all of today's."""
    texts = set()
    for spaces in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        texts.add("".join(detokenizer.push(part) for part in cut(ids, lengths)) + detokenizer.flush())
    assert len(texts) == 1


def test_transformers_takes_no_notice_either() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=spaced()._backend, unk_token="<unk>", bos_token="<s>")
    ids = [3, 1, 1, 2, 4, 5, 2]
    for spaces in (True, False):
        text = theirs.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert text == spaced().decode(ids, skip_special_tokens=False)
