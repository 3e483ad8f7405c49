"""What a speculator decides of its drafts reaches the step's result, and what is no decision costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput, LogprobOutput
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingBatch, SamplingParams
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.worker.worker import Worker
from pegboard.plugins.speculation.messages import MAX_FAILURES, NAME, Pass
from pegboard.plugins.speculation.part import SpeculationPart
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.device_queue import HostQueue
from pegboard.toolkit.sampling import tree
from tests.core.pipeline.harness import Seer

VOCAB, FORBIDDEN = 20, 19
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).index_fill_(
    1, torch.tensor([FORBIDDEN]), -torch.inf
)
"""The model: what follows each token."""

TREES = TokenTrees(np.array([1, 4, 2]), np.array([4, 5, 6, 7, 8, 9, 10]), np.array([-1, -1, 0, 0, 2, -1, 0]))
"""The second request's root has two children, and its second child has one; the third request has a chain."""

DRAWN = np.array([11, 6, 12, 8, 13, 14, 15])
"""By the sampler, at each node: of the second request, the first child stands."""

WALKED = ([1, 2, 1], [0, 1, 2, 5], [11, 6, 12, 14])
JUDGED = Accepted(np.array([1, 3, 2]), np.array([0, 1, 3, 4, 5, 6]), np.array([3, 7, 8, 2, 10, 1]))
GAINED = ([1, 3, 2], [0, 1, 3, 4, 5, 6], [11, 7, 8, 2, 10, 1])
"""What stands of that: nothing was drafted for the first request, so it gets what was drawn."""


class ScriptedRunner:
    """Draws DRAWN at the nodes of TREES, and echoes what it is given in other batches."""

    def __init__(self) -> None:
        self.inputs: list[list[int]] = []
        self.asked: list[bool] = []
        self.ctx = SimpleNamespace(spec=SimpleNamespace(vocab_size=VOCAB))

    def execute(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, *, return_logits: bool = False
    ) -> ForwardOutput:
        self.inputs.append(batch.input_ids.tolist())
        self.asked.append(return_logits)
        tokens = torch.from_numpy(DRAWN.copy()) if batch.logits_indices is not None else batch.input_ids
        output = ForwardOutput(tokens, logits=LOGITS[batch.input_ids] if return_logits else None)
        if sampling is not None and sampling.want_logprobs:
            output.logprobs = LogprobOutput(-torch.arange(1.0, len(tokens) + 1))
        return output


class Oracle(Seer):
    """Says which drafts stand, as it is told to."""

    def __init__(self, says: Callable[[Accepted], object]) -> None:
        super().__init__(1.0)
        self.says = says
        self.calls: list[tuple[list[int], list[int], list[int]]] = []

    def accept(self, trees: Any, logits: Any, sampling: Any, rows: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        assert torch.equal(logits, LOGITS[torch.from_numpy(trees.tokens)])
        self.calls.append((rows.tolist(), sampling.seeds.tolist(), sampling.steps.tolist()))
        return self.says(Accepted(JUDGED.counts.copy(), JUDGED.nodes.copy(), JUDGED.tokens.copy()))


class Rig:
    """A worker with a judge, and what its pool is told to move."""

    def __init__(self, says: Callable[[Accepted], object] = lambda good: good) -> None:
        self.runner, self.oracle = ScriptedRunner(), Oracle(says)
        self.moves: list[tuple[list[int], list[int]]] = []
        self.failures: list[object] = []
        part = SpeculationPart(self.oracle, self.failures.append, name="oracle", judges=True)
        self.rows = ReqToTokenPool(3, 16, 1)
        pool = SimpleNamespace(move=lambda *pair: self.moves.append((pair[0].tolist(), pair[1].tolist())))
        parts: list[Any] = [self.runner, None, pool, self.rows, HostQueue()]
        self.worker = Worker(*parts, parts=[part])

    def verify(self, logprobs: bool = False) -> BatchResult:
        counts = TREES.counts
        total = int(counts.sum())
        numbers = [SamplingParams().row(seed=seed, vocab_size=VOCAB) for seed in (30, 31, 32)]
        sampling = SamplingInfo(1, np.array(numbers, NUMBERS).repeat(counts), tree.depths(TREES) + 5)
        sampling.logprobs = (LogprobRequest(),) * total if logprobs else ()
        work = self._work(ForwardMode.TARGET_VERIFY, TREES.tokens, counts, sampling)
        work.trees, work.logits_indices, work.out_cache_loc = TREES, np.arange(total), np.arange(40, 40 + total)
        none = np.zeros(3, np.bool_)
        work.payloads[NAME] = Pass(work.rows, work.prefix_lens, counts, work.logits_indices, TREES, none, counts)
        return self.worker.run(work)

    def decode(self) -> list[int]:
        """Return the newest tokens, as the worker gives them to the next step."""
        numbers = [SamplingParams().row(seed=1, vocab_size=VOCAB)] * 3
        sampling = SamplingInfo(2, np.array(numbers, NUMBERS), np.ones(3, np.int64))
        work = self._work(ForwardMode.DECODE, np.full(3, -1), np.ones(3, np.int64), sampling)
        work.future_indices = np.arange(3)
        self.worker.run(work)
        return self.runner.inputs[-1]

    def _work(self, mode: ForwardMode, ids: Any, counts: Any, sampling: SamplingInfo) -> ModelWorkerBatch:
        three, rows = np.full(3, 4), np.array([2, 1, 3])
        return ModelWorkerBatch(1, mode, ids, ids, rows, three + counts, counts, three, ids, None, sampling, rows)


def plain(result: BatchResult) -> tuple[list[int], list[int], list[int]]:
    found = result.accepted
    assert found is not None
    assert result.tokens.tolist() == found.tokens.tolist()
    return found.counts.tolist(), found.nodes.tolist(), found.tokens.tolist()


def test_what_is_judged_to_stand_stands() -> None:
    rig = Rig()
    assert plain(rig.verify()) == GAINED
    assert rig.oracle.calls == [([2, 1, 3], [30, 31, 31, 31, 31, 32, 32], [5, 5, 6, 6, 7, 5, 6])]
    assert rig.moves == [([43, 44], [42, 43])], "the KV of what stands is where its position is"
    assert rig.decode() == [11, 2, 1], "the next step goes on from what stands"
    assert rig.runner.asked == [True, False], "logits are asked for only where there is something to judge"


def test_logprobs_are_those_of_what_stands() -> None:
    """Where that is what was drawn, as at node 3, they are the runner's."""
    result = Rig().verify(logprobs=True)
    assert result.logprobs is not None
    found, table = result.logprobs.token_logprobs, LOGITS.double().log_softmax(-1)
    expected = -torch.arange(1.0, 8.0)
    expected[[1, 4, 5, 6]] = table[[5, 8, 9, 10], [7, 2, 10, 1]].float()
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


FAULTS: dict[str, tuple[Callable[[Accepted], object], str]] = {
    "nothing": (lambda good: None, "raised"),
    "int32": (lambda good: Accepted(cast(Any, good.counts.astype("i4")), good.nodes, good.tokens), "not int64"),
    "torch": (lambda good: Accepted(good.counts, good.nodes, cast(Any, torch.from_numpy(good.tokens))), "not int64"),
    "one request": (lambda good: Accepted(good.counts[1:], good.nodes[1:], good.tokens[1:]), "2 counts for 3 trees"),
    "no token": (
        lambda good: Accepted(good.counts - np.eye(3, dtype=int)[0], good.nodes[1:], good.tokens[1:]),
        "1 at least",
    ),
    "too few": (lambda good: Accepted(good.counts, good.nodes[:-1], good.tokens), "5 nodes and 6 tokens"),
    "no root": (lambda good: changed(good, nodes=(1, 2)), "begin with its root"),
    "no path": (lambda good: changed(good, nodes=(3, 3)), "not a path"),
    "another's": (lambda good: changed(good, nodes=(3, 6)), "not a path"),
    "beyond": (lambda good: changed(good, nodes=(5, 99)), "not a path"),
    "not its token": (lambda good: changed(good, tokens=(1, 6)), "not that of the next node"),
    "no token of all": (lambda good: changed(good, tokens=(3, VOCAB)), "none of the vocabulary's 20"),
    "below": (lambda good: changed(good, tokens=(5, -1)), "none of the vocabulary's 20"),
    "forbidden": (lambda good: changed(good, tokens=(5, FORBIDDEN)), "the logits rule out"),
}


def changed(good: Accepted, **at: tuple[int, int]) -> Accepted:
    for name, (place, value) in at.items():
        getattr(good, name)[place] = value
    return good


@pytest.mark.parametrize(("says", "told"), FAULTS.values(), ids=list(FAULTS))
def test_what_is_no_judgement_is_not_used(
    says: Callable[[Accepted], object], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(says)
    result = rig.verify(logprobs=True)
    assert plain(result) == WALKED
    assert result.logprobs is not None
    assert result.logprobs.token_logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    assert len(rig.failures) == 1
    (line,) = [record.message for record in caplog.records if "oracle" in record.message]
    assert told in line
    assert rig.decode() == [11, 12, 14]


def test_one_that_keeps_failing_is_not_asked_any_more(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(lambda good: 1 / 0)
    for _ in range(MAX_FAILURES + 3):
        assert plain(rig.verify()) == WALKED
    assert len(rig.oracle.calls) == len(rig.failures) == MAX_FAILURES
    assert rig.runner.asked == [True] * MAX_FAILURES + [False] * 3
    told = [record.message for record in caplog.records if "oracle" in record.message]
    assert len(told) == 2
    assert "does not judge any more" in told[1]


def test_one_that_fails_now_and_then_goes_on() -> None:
    rig = Rig()
    rig.oracle.says = lambda good: good if len(rig.oracle.calls) % MAX_FAILURES == 0 else None
    found = [plain(rig.verify()) for _ in range(3 * MAX_FAILURES)]
    assert found == ([WALKED] * (MAX_FAILURES - 1) + [GAINED]) * 3


def test_answers_may_be_kept_and_changed() -> None:
    """A step's result is its own."""
    same = Accepted(JUDGED.counts.copy(), JUDGED.nodes.copy(), JUDGED.tokens.copy())
    rig = Rig(lambda good: same)
    result = rig.verify()
    for array in (same.counts, same.nodes, same.tokens):
        array[:] = 0
    assert plain(result) == GAINED
