"""What leaves the worker is on the host."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo, SplitPart
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput, LogprobOutput
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.pipeline.batch_result import BatchResult
from pegboard.core.pipeline.culprits import BadTokens
from pegboard.core.pipeline.guards import GuardedHooks
from pegboard.core.pipeline.req_to_token import ReqToTokenPool
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.pipeline.worker import PendingResult, Worker, on_host
from tests.core.pipeline.harness import Harness


def test_logprobs_on_the_host_stay_as_they_are() -> None:
    found = LogprobOutput(torch.zeros(2))
    assert on_host(found) is found
    assert on_host(None) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logprobs_leave_the_device_together() -> None:
    device = torch.device("cuda")
    ids = torch.tensor([[4, 5], [6, 7]], device=device)
    found = on_host(LogprobOutput(torch.ones(2, device=device), ids.float(), ids, {1: torch.zeros(3, device=device)}))
    assert found is not None
    assert {
        tensor.device.type
        for tensor in (found.token_logprobs, found.top_values, found.top_ids, found.chosen[1])
        if tensor is not None
    } == {"cpu"}
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[4, 5], [6, 7]]


class EchoRunner:
    """Samples its inputs, one layer at a time; notes the row table that each batch saw."""

    def __init__(self, layers: int = 3) -> None:
        self.layers = layers
        self.inputs: list[list[int]] = []
        self.tables: list[list[int]] = []
        self.ctx = SimpleNamespace(spec=SimpleNamespace(vocab_size=100))

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None) -> ForwardOutput:
        self.inputs.append(batch.input_ids.tolist())
        self.tables.append(batch.kv_groups[0].row_table[1].tolist())
        ids = batch.input_ids if batch.sample_rows is None else batch.input_ids[batch.sample_rows]
        return ForwardOutput(next_token_ids=ids + 1 if sampling is not None else ids[:0])

    def execute_in_parts(self, batch: ForwardBatch, sampling: SamplingBatch | None) -> Generator[None, None, Any]:
        for _ in range(self.layers):
            yield
        return self.execute(batch, sampling)


@pytest.fixture
def rows() -> ReqToTokenPool:
    return ReqToTokenPool(2, 8, 1, mirrored=True)


def work(rows: ReqToTokenPool, ids: list[int], *, pending: bool = False, **more: Any) -> ModelWorkerBatch:
    """A decode of one token for each of the first rows."""
    n = len(ids)
    ints = np.ones(n, np.int64)
    greedy = SamplingParams(temperature=0.0)
    sampling = SamplingInfo(1, np.array([greedy.row(seed=1, vocab_size=100)] * n, NUMBERS), ints)
    return ModelWorkerBatch(
        bid=1,
        forward_mode=ForwardMode.DECODE,
        input_ids=np.array(ids, np.int64),
        positions=ints,
        rows=np.arange(1, n + 1),
        seq_lens=ints * 2,
        extend_lens=ints,
        prefix_lens=ints,
        out_cache_loc=ints,
        sample_rows=None,
        sampling=sampling,
        sampled_rows=np.arange(1, n + 1),
        pending=np.arange(n) if pending else None,
        table=rows.take_changes(),
        **more,
    )


def make_worker(rows: ReqToTokenPool, runner: EchoRunner, **hooks: GuardedHooks) -> Worker:
    nothing: Any = None
    runner_: Any = runner
    return Worker(runner_, nothing, nothing, rows, torch.device("cpu"), **hooks)  # type: ignore[arg-type]


def test_sampled_tokens_reach_the_next_step_without_the_host(rows: ReqToTokenPool) -> None:
    runner = EchoRunner()
    worker = make_worker(rows, runner)
    first = worker.launch(work(rows, [5, 8]))
    second = worker.launch(work(rows, [-1, -1], pending=True))
    assert runner.inputs == [[5, 8], [6, 9]]
    assert first.result().tokens.tolist() == [6, 9]
    assert second.result().tokens.tolist() == [7, 10]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_next_step_starts_from_the_tokens_that_a_hook_leaves(rows: ReqToTokenPool, in_place: bool) -> None:
    def rewrite(batch: ForwardBatch, output: ForwardOutput) -> None:
        if in_place:
            output.next_token_ids += 20
        else:
            output.next_token_ids = output.next_token_ids + 20

    runner = EchoRunner()
    worker = make_worker(rows, runner, after=GuardedHooks("after_forward", [rewrite]))
    first = worker.launch(work(rows, [5, 8]))
    worker.launch(work(rows, [-1, -1], pending=True))
    assert first.result().tokens.tolist() == [26, 29]
    assert runner.inputs[1] == [26, 29]


def test_a_device_gets_no_id_beyond_the_vocabulary(rows: ReqToTokenPool) -> None:
    """There the host looks at ids when a step is done, and the next one may be under way by then."""
    runner = EchoRunner()
    worker = make_worker(rows, runner)
    worker._last_host = None
    worker.launch(work(rows, [99, 8]))
    worker.launch(work(rows, [-1, -1], pending=True))
    assert runner.inputs == [[99, 8], [99, 9]]
    arrived: Any = SimpleNamespace(synchronize=lambda: None)
    with pytest.raises(BadTokens, match=r"the sampled token 100 of row 1 is none of the vocabulary's 100"):
        PendingResult(torch.tensor([7, 100]), BatchResult(np.empty(0, np.int64)), arrived, 100, None).result()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_are_no_tokens_is_found_on_a_gpu(rows: ReqToTokenPool) -> None:
    nothing: Any = None
    runner: Any = EchoRunner()
    worker = Worker(runner, nothing, nothing, rows, torch.device("cuda"))
    pending = worker.launch(work(rows, [99, 8]))
    worker.launch(work(rows, [-1, -1], pending=True))
    assert runner.inputs == [[99, 8], [99, 9]]
    with pytest.raises(BadTokens, match="sampled token 100 of row 0"):
        pending.result()


def test_a_batch_sees_the_table_of_its_launch(rows: ReqToTokenPool) -> None:
    runner = EchoRunner()
    worker = make_worker(rows, runner)
    rows.write(1, 0, np.array([3, 4], np.int64))
    early = work(rows, [5])
    rows.write(1, 0, np.array([9], np.int64))
    late = work(rows, [5])
    worker.launch(early)
    worker.launch(late)
    assert [table[:2] for table in runner.tables] == [[3, 4], [9, 4]]


def test_parts_of_a_split_prefill(rows: ReqToTokenPool) -> None:
    runner = EchoRunner(layers=3)
    worker = make_worker(rows, runner)
    assert worker.run(work(rows, [5], part=SplitPart(2, True, False))).tokens.tolist() == []
    worker.run(work(rows, [50, 60]))
    assert worker.run(work(rows, [5], part=SplitPart(2, False, True))).tokens.tolist() == [6]
    assert runner.inputs == [[50, 60], [5]]
    with pytest.raises(RuntimeError, match="first parts are not there"):
        worker.run(work(rows, [5], part=SplitPart(2, False, True)))


def test_an_idle_batch_has_no_tokens() -> None:
    harness = Harness()
    batch = harness.scheduler.stages.builder.idle()
    assert batch.forward_mode is ForwardMode.IDLE
    runner = EchoRunner()
    assert make_worker(harness.rows, runner).run(batch).tokens.tolist() == []
    assert runner.inputs == [[]]
