"""The processors against transformers' own, or OpenAI's formula in a loop, where not every row takes part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.sampling import Grammar, SamplingParams, SamplingRow
from pegboard.plugins.logits_basic.penalties import Penalties
from pegboard.plugins.logits_basic.processors import LogitBias, MinNewTokens
from pegboard.plugins.sampler_torch.sampler import TorchSampler

VOCAB = 40
CONTEXT = LogitsProcessorContext(VOCAB, torch.device("cpu"), frozenset({2, 7}))


def row(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> SamplingRow:
    ids = (np.array(tokens or [], dtype=np.int64) for tokens in (prompt, output))
    return SamplingRow(SamplingParams(**params), *ids)  # type: ignore[arg-type]


def run(cls: type[LogitsProcessor], rows: list[SamplingRow], logits: torch.Tensor) -> torch.Tensor:
    processor = cls(NoOptions(), CONTEXT)
    state, changed = processor.prepare(rows), logits.clone()
    if state is not None:
        processor.apply(changed, state)
    return changed


def random_logits(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("cls", "params", "others"),
    [
        (LogitBias, {"logit_bias": {3: 1.0}}, {"min_new_tokens": 3, "repetition_penalty": 2.0}),
        (Penalties, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}),
        (Penalties, {"presence_penalty": -0.5}, {"min_new_tokens": 2}),
        (Penalties, {"repetition_penalty": 1.1}, {"temperature": 0.3}),
        (MinNewTokens, {"min_new_tokens": 1}, {"repetition_penalty": 1.3}),
    ],
)
def test_takes_part_only_where_asked(cls: type[LogitsProcessor], params: Any, others: Any) -> None:
    processor = cls(NoOptions(), CONTEXT)
    assert processor.wants(SamplingParams(**params))
    assert not processor.wants(SamplingParams(**others))
    bystanders = [row([1, 2], [3], **others), row([], [])]
    assert processor.prepare(bystanders) is None
    logits = random_logits(3)
    changed = run(cls, [bystanders[0], row([4], [], **params), bystanders[1]], logits)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])


def test_bias_is_added() -> None:
    logits = random_logits(3)
    rows = [row(logit_bias={0: -100.0, 39: 2.5}), row(), row(logit_bias={5: 1.0})]
    expected = logits.clone()
    expected[0, 0] -= 100.0
    expected[0, 39] += 2.5
    expected[2, 5] += 1.0
    assert torch.equal(run(LogitBias, rows, logits), expected)


def test_bias_follows_the_batch() -> None:
    """What was gathered for one batch is not used for another, and is gathered once for the same."""
    processor = LogitBias(NoOptions(), CONTEXT)
    first, second = row(logit_bias={1: 1.0}), row(logit_bias={2: 1.0})
    state = processor.prepare([first, second])
    assert processor.prepare([row(output=[5]), first]) is not state
    again = processor.prepare([first, second])
    assert processor.prepare([SamplingRow(one.params, one.prompt_ids, one.output_ids) for one in (first, second)]) is (
        again
    )
    assert processor.prepare([first]) is not again
    changed = torch.zeros(2, VOCAB)
    processor.apply(changed, processor.prepare([second, first]))  # type: ignore[arg-type]
    assert changed.nonzero().tolist() == [[0, 2], [1, 1]]


_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(_IDS, _IDS, st.sampled_from([1.0, 0.5, 1.3, 2.0]), st.floats(-2, 2), st.floats(-2, 2)), min_size=1
    )
)
def test_penalties(batch: list[tuple[list[int], list[int], float, float, float]]) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(len(batch), len(batch))
    rows, expected = [], logits.clone()
    for index, (prompt, output, repetition, frequency, presence) in enumerate(batch):
        rows.append(
            row(
                prompt,
                output,
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )
        )
        if repetition != 1.0 and prompt + output:
            theirs = RepetitionPenaltyLogitsProcessor(penalty=repetition)
            expected[index] = theirs(torch.tensor([prompt + output]), expected[index : index + 1])[0]
        for token in set(output):
            expected[index, token] -= frequency * output.count(token) + presence
    torch.testing.assert_close(run(Penalties, rows, logits), expected, rtol=1e-6, atol=1e-5)


def test_penalties_leave_forbidden_tokens_forbidden() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3] = 1.0
    changed = run(Penalties, [row([1, 3], [4], repetition_penalty=0.5, presence_penalty=-1.0)], logits)
    assert changed.isfinite().nonzero().tolist() == [[0, 3]]


def test_tokens_of_media_have_no_logit() -> None:
    """Multimodal prompts hold hashes far beyond the vocabulary."""
    logits = random_logits(1)
    changed = run(Penalties, [row([3, 10**12], repetition_penalty=2.0)], logits)
    assert (changed != logits).nonzero().tolist() == [[0, 3]]


def test_penalties_do_not_leak_into_the_next_row() -> None:
    logits = torch.ones(2, VOCAB)
    changed = run(Penalties, [row([3], repetition_penalty=2.0), row([4], repetition_penalty=2.0)], logits)
    assert (changed != 1).nonzero().tolist() == [[0, 3], [1, 4]]


def test_min_new_tokens_like_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    theirs = MinNewTokensLengthLogitsProcessor(prompt_length_to_skip=4, min_new_tokens=3, eos_token_id=[2, 7])
    for generated in range(5):
        logits = random_logits(1, generated)
        expected = theirs(torch.zeros(1, 4 + generated, dtype=torch.int64), logits)
        assert torch.equal(run(MinNewTokens, [row([1] * 4, [1] * generated, min_new_tokens=3)], logits), expected)


def test_min_new_tokens_forbids_stop_tokens_of_the_row_too() -> None:
    rows = [row(output=[1], min_new_tokens=2, stop_token_ids=(9, 2)), row(output=[1], min_new_tokens=2), row()]
    changed = run(MinNewTokens, rows, torch.zeros(3, VOCAB))
    assert changed.isneginf().nonzero().tolist() == [[0, 2], [0, 7], [0, 9], [1, 2], [1, 7]]


def test_min_new_tokens_of_a_model_without_eos() -> None:
    processor = MinNewTokens(NoOptions(), LogitsProcessorContext(VOCAB, torch.device("cpu"), frozenset()))
    assert processor.prepare([row(min_new_tokens=5)]) is None


def test_min_new_tokens_that_no_token_is_left_for() -> None:
    processor = MinNewTokens(NoOptions(), CONTEXT)
    every = SamplingParams(min_new_tokens=1, stop_token_ids=tuple(token for token in range(VOCAB) if token != 7))
    with pytest.raises(InvalidRequest) as caught:
        processor.wants(every)
    assert caught.value.param == "min_new_tokens"
    assert processor.wants(SamplingParams(min_new_tokens=1, stop_token_ids=every.stop_token_ids[1:]))
    assert not processor.wants(SamplingParams(stop_token_ids=every.stop_token_ids))


def test_the_end_of_a_grammar_goes_before_min_new_tokens() -> None:
    """Where the grammar leaves nothing but the end, that is taken; where it leaves more, the end is not."""
    rows = [row(output=[1], min_new_tokens=3, grammar=Grammar("regex", "a*"))]
    changed = run(MinNewTokens, rows, random_logits(1))
    assert changed.isfinite().all()
    assert not set(changed[0].topk(VOCAB - 2).indices.tolist()) & {2, 7}
    only_the_end = torch.full((1, VOCAB), -torch.inf)
    only_the_end[0, 7] = changed[0, 7]
    sampler = TorchSampler(NoOptions(), SamplerContext(VOCAB, torch.device("cpu")))
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 3}):
        assert sampler.sample(only_the_end.clone(), make_sampling([params], VOCAB)).tolist() == [7]


class Counted(np.ndarray):
    """An output that notes how many tokens of it are read."""

    read = 0

    def tolist(self) -> Any:
        Counted.read += len(self)
        return super().tolist()


def test_a_step_looks_at_new_tokens_only() -> None:
    """What a decode step costs on the host does not grow with the prompt or the output."""
    processor = Penalties(NoOptions(), CONTEXT)
    future = np.random.default_rng(1).integers(0, VOCAB, 300)
    memos: list[dict[object, Any]] = [{}, {}]
    params = [SamplingParams(repetition_penalty=1.2, presence_penalty=0.5), SamplingParams(frequency_penalty=0.3)]
    Counted.read = 0
    states = set()
    for step in range(1, 300):
        output = future[:step].view(Counted)
        rows = [SamplingRow(one, future[:50], output, 0, memo) for one, memo in zip(params, memos, strict=True)]
        states.add(id(processor.prepare(rows)))
    assert Counted.read == 2 * 299
    assert len(states) == 1, "the batch stayed the same, and so does what was gathered of it"


def test_room_for_new_tokens_runs_out() -> None:
    """Far more distinct tokens than were there when the batch was gathered."""
    vocab = 5000
    processor = Penalties(NoOptions(), LogitsProcessorContext(vocab, torch.device("cpu"), frozenset()))
    memo: dict[object, Any] = {}
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25)
    output = np.random.default_rng(2).permutation(vocab)[:1500]
    for step in range(0, 1500, 7):
        state = processor.prepare([SamplingRow(params, np.array([3, 9]), output[:step], 0, memo)])
        logits = torch.full((1, vocab), 3.0)
        processor.apply(logits, state)  # type: ignore[arg-type]
        expected = torch.full((1, vocab), 3.0)
        expected[0, output[:step]] = 2.0 - 0.25
        expected[0, [token for token in (3, 9) if token not in output[:step]]] = 2.0
        torch.testing.assert_close(logits, expected)
