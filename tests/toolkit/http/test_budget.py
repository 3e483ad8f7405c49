"""Budgets: what is charged, and what is cut so that it need not be refused."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.frontend.intake import Intake
from pegboard.core.frontend.prompts import Prompts
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.points import encoded
from pegboard.plugins.row_outputs.messages import NAME, Asked
from pegboard.toolkit.http.budget import Budget, BudgetLimits, Demand
from tests.features import prices

CONTEXT = 131_072
HIDDEN = 4096
PRICES = prices(HIDDEN)

Pair = tuple[GenerateRequest, TokenizedRequest]


def pair(prompt_tokens: int, longest: int | None, context: int = CONTEXT, least: int = 0, **wanted: Any) -> Pair:
    """A request, and what Intake makes of it: a length that is open ends with the context."""
    room = context - prompt_tokens
    asked = GenerateRequest(prompt=[1], sampling=SamplingParams(max_new_tokens=longest), **wanted)
    most = room if longest is None else min(longest, room)
    sampling = SamplingParams(max_new_tokens=most, min_new_tokens=min(least, most))
    start, hidden = wanted.pop("logprob_start", None), wanted.pop("return_hidden_states", False)
    made = TokenizedRequest(rid="r", prompt=b"\1\0\0\0" * prompt_tokens, sampling=sampling, **wanted)
    if start is not None or hidden:
        made.features[NAME] = encoded(Asked(start, hidden))
    return asked, made


def lengths(budget: Budget, pairs: list[Pair]) -> list[int]:
    """The lengths that remain. Raises InvalidRequest where the budget refuses them."""
    asked, prepared = [one for one, _ in pairs], [one for _, one in pairs]
    fitted = budget.fit(asked, prepared, PRICES)
    budget.charge(Demand.of(fitted, PRICES))
    found = [one.sampling.max_new_tokens or 0 for one in fitted]
    assert all(one.sampling.min_new_tokens <= length for one, length in zip(fitted, found, strict=True))
    return found


@pytest.mark.parametrize(
    ("pairs", "price"),
    [
        ([pair(25_000, None, logprobs=5)], 6 * 320),
        ([pair(10, None, 8192, logprobs=1)] * 33, 2 * 320),
        ([pair(1_000, None, logprobs=1, logprob_start=0)], 2 * 320),
        ([pair(100, None, return_hidden_states=True)], HIDDEN * 64),
        ([pair(100, None, return_hidden_states=True, logprobs=0)] * 3, HIDDEN * 64 + 320),
        ([pair(100, 5_000, logprobs=20), pair(100, None, logprobs=20)], 21 * 320),
    ],
    ids=["a long prompt", "33 answers", "prompt logprobs", "hidden states", "both", "beside one with a length"],
)
def test_open_lengths_are_cut_to_all_that_is_left(pairs: list[Pair], price: int) -> None:
    found = lengths(Budget(), pairs)
    spent = Demand.of([_lengthened(one, n)[1] for one, n in zip(pairs, found, strict=True)], PRICES).bytes
    open_ones = sum(asked.sampling.max_new_tokens is None for asked, _ in pairs)
    assert BudgetLimits().request_bytes - spent < price * open_ones, "one token more for each would have fitted"


def _lengthened(one: Pair, longest: int) -> Pair:
    """The same with this length given, unless it had one."""
    asked, made = one
    if asked.sampling.max_new_tokens is None:
        asked = replace(asked, sampling=replace(asked.sampling, max_new_tokens=longest))
        made = replace(made, sampling=replace(made.sampling, max_new_tokens=longest))
    return asked, made


@st.composite
def some_pair(draw: st.DrawFn) -> Pair:
    prompt = draw(st.integers(1, 3_000))
    wanted: dict[str, Any] = {"return_hidden_states": draw(st.booleans())}
    if draw(st.booleans()):
        wanted["logprobs"] = draw(st.integers(0, 128))
        wanted["token_ids_logprob"] = tuple(range(draw(st.integers(0, 50))))
        if draw(st.booleans()):
            wanted["logprob_start"] = draw(st.integers(0, prompt - 1))
    longest = draw(st.none() | st.integers(0, 20))
    return pair(prompt, longest, draw(st.sampled_from([3_001, 8_192, CONTEXT])), draw(st.integers(0, 3_000)), **wanted)


@settings(max_examples=200, deadline=None)
@given(st.lists(some_pair(), min_size=1, max_size=12), st.sampled_from([2**18, 2**20, 2**24, 2**26]))
def test_what_is_cut_is_taken(pairs: list[Pair], size: int) -> None:
    """Wherever one token for each open length fits."""
    budget = Budget(BudgetLimits(request_bytes=size))
    try:
        budget.charge(Demand.of([_lengthened(one, 1)[1] for one in pairs], PRICES))
    except InvalidRequest:
        return
    for (asked, made), length in zip(pairs, lengths(budget, pairs), strict=True):
        given_length = asked.sampling.max_new_tokens
        assert length == made.sampling.max_new_tokens if given_length is not None else length >= 1


# ---- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "length", "taken"),
    [(1024, 3_000, True), (1, 2_796_202, True), (1, 2_796_203, False), (8, 1_500_000, False), (1024, 16_400, False)],
)
def test_texts_take_memory_one_at_a_time(count: int, length: int, taken: bool) -> None:
    """The longest is what the tokenizer holds; of the others there are packed tokens."""
    texts = [f"{i:04}".ljust(length, "x") for i in range(count)]
    budget = Budget()
    if taken:
        budget.check_texts(texts * 2)
        return
    with pytest.raises(InvalidRequest, match="request_bytes") as caught:
        budget.check_texts(texts)
    assert caught.value.code == "request_too_costly"


def test_tokens_are_packed_before_the_next_text_is_tokenised() -> None:
    """What `WAITING_BYTES` counts on."""

    class Ids(list[int]):
        """A list that can be watched."""

    seen: list[weakref.ref[Ids]] = []

    class Watched(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert sum(one() is not None for one in seen) <= 1
            ids = Ids(super().encode(text, add_special_tokens=add_special_tokens))
            seen.append(weakref.ref(ids))
            return ids

    async def scene() -> None:
        tokenizer = Watched()
        prompts = Prompts(Intake(FakeEngineClient().info, tokenizer), tokenizer)
        async with prompts.packed([GenerateRequest(prompt=f"text {i}") for i in range(20)]) as packed:
            assert len({one.ids for one in packed}) == 20

    asyncio.run(scene())
