"""bad_words: what is forbidden where, as vLLM has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar, SamplingParams, SamplingRow
from pegboard.plugins.logits_custom.bad_words import BadWords

VOCAB = 128


class Spaced(FakeTokenizer):
    """A space and the letter behind it are one token, a capital letter, as byte-pair tokenizers have it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        joined = "".join(f"\0{char}" if char == " " else char for char in text)
        pieces: list[int] = []
        for char in joined.replace("\0 ", "\0"):
            if pieces and pieces[-1] == 0 and char.islower():
                pieces[-1] = ord(char.upper())
            else:
                pieces.append(ord(char))
        return [32 if piece == 0 else piece for piece in pieces]


def make(tokenizer: FakeTokenizer | None = None) -> BadWords:
    return BadWords(
        NoOptions(), LogitsProcessorContext(VOCAB, torch.device("cpu"), frozenset(), tokenizer or FakeTokenizer())
    )


def forbidden(processor: BadWords, words: Sequence[str], output: str, prompt: str = "") -> str:
    """The characters that may not come next."""
    params = SamplingParams(extra={"bad_words": {"words": list(words)}})
    ids = (np.array(list(map(ord, text)), dtype=np.int64) for text in (prompt, output))
    logits = torch.zeros(1, VOCAB)
    state = processor.prepare([SamplingRow(params, *ids)])  # type: ignore[arg-type]
    if state is not None:
        processor.apply(logits, state)
    return "".join(map(chr, logits[0].isneginf().nonzero().flatten().tolist()))


@pytest.mark.parametrize(
    ("words", "output", "expected"),
    [
        (["c"], "", "c"),
        (["abc"], "", ""),
        (["abc"], "ab", "c"),
        (["abc"], "xab", "c"),
        (["abc"], "abx", ""),
        (["abc"], "b", ""),
        (["abc", "abd", "bz", "y"], "ab", "cdyz"),
        (["aa"], "aaa", "a"),
        (["  abc"], "ab", "c"),
        ([" "], "", " "),
        (["abc", "abc"], "ab", "c"),
        (["bc", "abc"], "ab", "c"),
    ],
)
def test_the_last_token_of_a_word(words: list[str], output: str, expected: str) -> None:
    assert forbidden(make(), words, output) == expected


def test_the_prompt_is_none_of_its_business() -> None:
    assert forbidden(make(), ["abc"], "b", prompt="a") == ""


def test_both_spellings_of_a_word() -> None:
    """At the beginning of a text, and with the space that goes with its first token."""
    processor = make(Spaced())
    assert forbidden(processor, ["ab"], "a") == "b"
    assert forbidden(processor, ["ab"], "A") == "b"
    assert forbidden(processor, ["a"], "") == "Aa"


def test_where_a_grammar_leaves_nothing_else_it_may_be() -> None:
    params = SamplingParams(extra={"bad_words": {"words": ["a"]}}, grammar=Grammar("regex", "a"))
    processor, logits = make(), torch.zeros(1, VOCAB)
    state = processor.prepare([SamplingRow(params, np.array([1]), np.empty(0, dtype=np.int64))])
    assert state is not None
    logits[0, 98] = -torch.inf
    processor.apply(logits, state)
    assert logits.isfinite().sum() == VOCAB - 1
    assert logits[0].argsort()[:2].tolist() == [98, 97]


@pytest.mark.parametrize("words", ["abc", [""], [3], ["a"] * 300, ["a" * 300], {"a": 1}])
def test_refused(words: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make().wants(SamplingParams(extra={"bad_words": {"words": words}}))
    assert (caught.value.status, caught.value.param) == (400, "custom_params.bad_words.words")


def test_no_words_take_no_part() -> None:
    assert not make().wants(SamplingParams(extra={"bad_words": {}}))


def test_answers_with_the_same_words_share_their_tokens() -> None:
    class Counting(FakeTokenizer):
        encoded = 0

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            self.encoded += 1
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Counting()
    processor = make(tokenizer)
    assert forbidden(processor, ["abc", "de"], "ab") == "c"
    once = tokenizer.encoded
    for _ in range(10):
        # A new request each time.
        assert forbidden(processor, ["abc", "de"], "d") == "e"
    assert tokenizer.encoded == once
    assert forbidden(processor, ["dx"], "d") == "x"
    assert tokenizer.encoded > once
