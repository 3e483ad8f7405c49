"""Stop expressions through the pipeline: the scheduler ends the output where `re` says, and streams show what stands
before it, whatever the tokens are and however they travel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.frontend.outputs import OutputState, merge
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import TokenizedRequest, TokenOutput
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.executor import Done, LocalExecutor
from tests.core.pipeline.harness import Harness
from tests.features import FEATURES
from tests.plugins.stop_expressions.test_regex_matcher import PATTERNS, oracle, usable


class Pieces(FakeTokenizer):
    """Tokens of any text: their ids are places in a list."""

    vocab_size = 1000
    special_ids = frozenset()
    eos_token_ids = frozenset()

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__()
        self.pieces = list(pieces)

    def id_to_token(self, token_id: int) -> str | None:
        return self.pieces[token_id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids)


def run(pieces: Sequence[str], sampling: dict[str, Any]) -> tuple[list[TokenOutput], Pieces]:
    """What the scheduler sends of an output whose tokens have these texts."""
    # Token 7 ends an output in this harness.
    table = [*pieces[:7], "", *pieces[7:]]
    ids = iter(place for place in range(len(table)) if place != 7)
    tokenizer = Pieces(table)
    harness = Harness(tokenizer=tokenizer, loop="normal")
    harness.scheduler.components.executor = LocalExecutor(
        lambda work: Done(BatchResult(np.array([next(ids)], np.int64)))
    )
    harness.submit("a", [3, 4], len(pieces), stream=True, sampling=sampling)
    harness.run()
    return harness.outputs["a"], tokenizer


def shown(outputs: Sequence[TokenOutput], tokenizer: Pieces, sampling: dict[str, Any], group: int = 1) -> list[str]:
    """The texts of the chunks, `group` outputs each in one."""
    state = OutputState(TokenizedRequest(rid="a", prompt=b"", sampling=SamplingParams(**sampling)), tokenizer, FEATURES)
    texts = []
    for at in range(0, len(outputs), group):
        first, *others = (TokenOutput(rid="a", token_ids=list(o.token_ids), finish_reason=o.finish_reason)
                          for o in outputs[at : at + group])  # fmt: skip
        for other in others:
            first = merge(first, other)
        texts.append(state.push(first).text)
    return texts


@settings(max_examples=80, deadline=None)
@given(
    patterns=st.lists(PATTERNS, min_size=1, max_size=2).filter(usable),
    pieces=st.lists(st.text("abA \n1_", max_size=3), min_size=1, max_size=8),
    group=st.integers(1, 4),
    keep=st.booleans(),
)
def test_ends_where_re_says(patterns: list[str], pieces: list[str], group: int, keep: bool) -> None:
    sampling = {"stop_regex": tuple(patterns), "no_stop_trim": keep}
    outputs, tokenizer = run(pieces, sampling)
    sent = "".join(pieces[: sum(len(output.token_ids) for output in outputs)])
    reason = outputs[-1].finish_reason
    match = oracle(patterns, sent)
    text = "".join(shown(outputs, tokenizer, sampling, group))
    if reason == {"type": "length"}:
        assert sent == text == "".join(pieces)
        assert match is None or match[1] == len(sent)
        return
    assert match is not None
    assert reason == {"type": "stop", "matched": reason["matched"]}  # type: ignore[index]
    assert reason["matched"] in patterns
    assert text == sent[: match[1] if keep else match[0]]
    # Nothing ended earlier, unless what follows had to be seen.
    earlier = sent[: len(sent) - len(pieces[sum(len(o.token_ids) for o in outputs) - 1])]
    before = oracle(patterns, earlier)
    waited = before is not None and before[1] == len(earlier) and re.search(r"\\[bB]|\$", "".join(patterns))
    assert before is None or before[1] == match[1] or waited


@settings(max_examples=60, deadline=None)
@given(
    pattern=st.sampled_from(["a+b", r"\ba", "a.a", r"(?m)^b"]),
    stops=st.lists(st.text("ab", min_size=1, max_size=2), max_size=1),
    pieces=st.lists(st.text("ab\n", max_size=3), min_size=1, max_size=10),
    least=st.integers(0, 10),
    groups=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_streams_show_the_same_however_tokens_travel(
    pattern: str, stops: list[str], pieces: list[str], least: int, groups: tuple[int, int]
) -> None:
    sampling = {
        "stop_regex": (pattern,),
        "stop": tuple(stops),
        "min_new_tokens": min(least, len(pieces)),
    }
    outputs, tokenizer = run(pieces, sampling)
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens >= sampling["min_new_tokens"]  # type: ignore[operator]
    texts = {"".join(shown(outputs, tokenizer, sampling, group)) for group in (1, *groups)}
    assert len(texts) == 1
    (text,) = texts
    assert "".join(pieces[:tokens]).startswith(text)
    if outputs[-1].finish_reason == {"type": "length"}:
        assert text == "".join(pieces)


def test_what_may_belong_to_a_match_waits() -> None:
    sampling = {"stop_regex": (r"\n+User:",)}
    outputs, tokenizer = run(["Hi.", "\n", "\nU", "h", "\n\n", "User", ":", "x"], sampling)
    assert outputs[-1].finish_reason == {"type": "stop", "matched": r"\n+User:"}
    assert shown(outputs, tokenizer, sampling) == ["Hi.", "", "", "\n\nUh", "", "", ""]


def test_a_match_before_min_new_tokens_is_text() -> None:
    sampling = {"stop_regex": ("a+",), "min_new_tokens": 3}
    outputs, tokenizer = run(["xa", "a", "ba", "a"], sampling)
    assert len(outputs) == 3
    assert shown(outputs, tokenizer, sampling) == ["xa", "a", "b"]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_token_is_looked_at_first(keep: bool) -> None:
    sampling = {"stop_regex": ("b",), "stop_token_ids": (1,), "no_stop_trim": keep}
    outputs, tokenizer = run(["a", "b", "c"], sampling)
    assert outputs[-1].finish_reason == {"type": "stop", "matched": 1}
    assert "".join(shown(outputs, tokenizer, sampling)) == ("ab" if keep else "a")


def test_an_earlier_place_that_only_looks_like_the_match_stays() -> None:
    sampling = {"stop_regex": (r"\bend",)}
    outputs, tokenizer = run(["bend", " end", "."], sampling)
    assert "".join(shown(outputs, tokenizer, sampling)) == "bend "
