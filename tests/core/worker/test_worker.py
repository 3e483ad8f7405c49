"""What leaves the worker is on the host."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.ahead import Wants
from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo, SplitPart
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput, LogprobOutput
from pegboard.core.interfaces.sampler import NO_TOKEN
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.interfaces.step import StepLost
from pegboard.core.pipeline.guards import GuardedHooks
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.worker.computed import Computed
from pegboard.core.worker.worker import Worker
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.device_queue import Block, CudaQueue, DeviceQueue, HostQueue
from pegboard.toolkit.system.culprits import BadTokens
from tests.fakes.device_queue import ApartQueue


def logprobs_on(device: torch.device) -> LogprobOutput:
    ids = torch.tensor([[4, 5], [6, 7]], device=device)
    return LogprobOutput(torch.ones(2, device=device), ids.float(), ids, {1: torch.zeros(3, device=device)})


@pytest.mark.parametrize("kind", [HostQueue, ApartQueue, pytest.param(CudaQueue, marks=pytest.mark.gpu)])
def test_what_was_computed_comes_back_together(kind: Callable[..., DeviceQueue]) -> None:
    """In one copy, each tensor with its type and shape, also where some are empty or not contiguous."""
    queue = kind(torch.device("cuda")) if kind is CudaQueue else kind()
    states = torch.arange(12, dtype=torch.float32, device=queue.device).view(3, 4)
    output = ForwardOutput(
        torch.tensor([3, 4], device=queue.device), logprobs_on(queue.device), row_states=states.T[:3].T
    )
    assert output.row_states is not None
    empty = torch.empty(0, device=queue.device)
    found = Computed.of(output, {"acme": {"none": empty, "states": output.row_states.float()}})
    result = found.result(queue.fetch(found.tensors).wait())
    assert result.tokens.tolist() == [3, 4]
    assert result.logprobs is not None
    assert result.logprobs.top_ids is not None
    assert result.logprobs.top_values is not None
    assert result.logprobs.top_ids.tolist() == [[4, 5], [6, 7]]
    assert result.logprobs.top_values.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert result.logprobs.chosen[1].tolist() == [0.0] * 3
    assert result.parts["acme"]["none"].shape == (0,)
    assert result.parts["acme"]["states"].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]


R = TypeVar("R")


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
        ids = batch.input_ids if batch.logits_indices is None else batch.input_ids[batch.logits_indices]
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
        logits_indices=None,
        sampling=sampling,
        sampled_rows=np.arange(1, n + 1),
        future_indices=np.arange(n) if pending else None,
        table=rows.take_changes(),
        **more,
    )


def make_worker(rows: ReqToTokenPool, runner: EchoRunner, queue: DeviceQueue | None = None, **more: Any) -> Worker:
    nothing: Any = None
    runner_: Any = runner
    return Worker(runner_, nothing, nothing, rows, queue or HostQueue(), **more)


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


@pytest.mark.parametrize("kind", [HostQueue, ApartQueue, pytest.param(CudaQueue, marks=pytest.mark.gpu)])
def test_a_device_gets_no_id_beyond_the_vocabulary(rows: ReqToTokenPool, kind: Callable[..., DeviceQueue]) -> None:
    """The host looks at ids when a step is done, and the next one may be under way by then."""
    runner = EchoRunner()
    worker = make_worker(rows, runner, kind(torch.device("cuda")) if kind is CudaQueue else kind())
    first = worker.launch(work(rows, [99, 8]))
    worker.launch(work(rows, [-1, -1], pending=True))
    assert runner.inputs == [[99, 8], [99, 9]]
    with pytest.raises(BadTokens, match=r"the sampled token 100 of row 0 is none of the vocabulary's 100"):
        first.result()


@pytest.mark.parametrize("kind", [HostQueue, ApartQueue])
def test_a_row_without_a_token(rows: ReqToTokenPool, kind: Callable[[], DeviceQueue]) -> None:
    """The result says so; a step that is under way computes some token in its place, and nothing fails."""
    runner = EchoRunner()
    worker = make_worker(rows, runner, kind())
    first = worker.launch(work(rows, [NO_TOKEN - 1, 8]))
    second = worker.launch(work(rows, [-1, -1], pending=True))
    assert runner.inputs[1] == [0, 9]
    assert first.result().tokens.tolist() == [NO_TOKEN, 9]
    assert first.result().unsampled
    assert not second.result().unsampled


@pytest.mark.parametrize("kind", [HostQueue, ApartQueue])
def test_device_parts_are_told_of_tokens_only(rows: ReqToTokenPool, kind: Callable[[], DeviceQueue]) -> None:
    """They may embed them, which for -1 would be the end of a CUDA context."""
    told: list[list[int]] = []

    class Embeds(DevicePart):
        name = "embeds"

        def computed(self, payload: object, batch: ForwardBatch, output: ForwardOutput) -> dict[str, torch.Tensor]:
            assert output.newest is not None
            told.append(output.newest.tolist())
            return {}

    worker = make_worker(rows, EchoRunner(), kind(), parts=[Embeds()])
    pending = worker.launch(work(rows, [NO_TOKEN - 1, 99], payloads={"embeds": None}))
    assert told == [[0, 99]]
    with pytest.raises(BadTokens):
        pending.result()


class Reuses(ApartQueue):
    """Lays each step's arrays into the same block."""

    def block(self, nbytes: int) -> Block:
        self.kept = getattr(self, "kept", None) or super().block(2**20)
        self.kept.used = 0
        return self.kept


@pytest.mark.parametrize(("kind", "right"), [(ApartQueue, True), (Reuses, False)])
def test_what_is_kept_from_step_to_step_stays(
    rows: ReqToTokenPool, kind: Callable[[], DeviceQueue], right: bool
) -> None:
    """Sampling parameters outlive the step that they came with; and all that a step needs goes over at once."""
    queue = kind()
    worker = make_worker(rows, EchoRunner(), queue)
    seeds = []
    for ids, count in (([5, 8], 50), ([6, 9], 500)):
        batch = work(rows, ids, extras={"acme.note": np.arange(count), "acme.name": "x"})
        assert batch.sampling is not None
        sent = worker.batches.send(batch, None)
        assert sent.sampling is not None
        seeds.append(sent.sampling.seeds.tolist())
        assert sent.batch.extras["acme.note"].tolist() == list(range(count))
        assert sent.batch.extras["acme.name"] == "x"
        batch.sampling.numbers["seed"] = 7  # the same version: this must not be seen
    assert (seeds == [[1, 1], [1, 1]]) is right
    if right:
        assert isinstance(queue, ApartQueue)
        assert queue.copies == 2


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


class Around(DevicePart):
    """Notes what is computed within it."""

    def __init__(self, name: str, runner: EchoRunner, *, lost: bool = False) -> None:
        self.name, self.runner, self.lost = name, runner, lost
        self.seen: list[object] = []

    def execute(self, payload: object, batch: ForwardBatch, run: Callable[[], R]) -> R:
        self.seen.append((payload, batch.input_ids.tolist(), len(self.runner.inputs)))
        if self.lost:
            raise StepLost("nothing came")
        result = run()
        self.seen.append(len(self.runner.inputs))
        return result


def test_device_parts_work_around_the_passes_that_they_have_a_payload_for(rows: ReqToTokenPool) -> None:
    runner = EchoRunner()
    parts = [Around("a", runner), Around("b", runner)]
    worker = make_worker(rows, runner, parts=parts)
    assert worker.run(work(rows, [5], payloads={"a": 1, "b": 2})).tokens.tolist() == [6]
    worker.run(work(rows, [7], payloads={"b": 3}))
    worker.run(work(rows, [8]))
    assert [part.seen for part in parts] == [[(1, [5], 0), 1], [(2, [5], 0), 1, (3, [7], 1), 2]]


def test_device_parts_work_around_the_first_part_of_a_split_prefill(rows: ReqToTokenPool) -> None:
    runner = EchoRunner(layers=3)
    part = Around("a", runner)
    worker = make_worker(rows, runner, parts=[part])
    worker.run(work(rows, [5], part=SplitPart(2, True, False), payloads={"a": 1}))
    assert part.seen == [(1, [5], 0), 0]
    assert worker.run(work(rows, [5], part=SplitPart(2, False, True), payloads={"a": 1})).tokens.tolist() == [6]
    assert len(part.seen) == 2


def test_what_a_part_lacks_loses_the_step(rows: ReqToTokenPool) -> None:
    runner = EchoRunner()
    worker = make_worker(rows, runner, parts=[Around("a", runner, lost=True)])
    with pytest.raises(StepLost, match="nothing came"):
        worker.run(work(rows, [5], payloads={"a": 1}))
    assert not runner.inputs


def test_device_parts_read_the_logits_of_a_split_prefill(rows: ReqToTokenPool) -> None:
    class Reading(DevicePart):
        name = "a"

        def wants(self, payload: object) -> Wants:
            return Wants(logits=True)

        def computed(self, payload: object, batch: ForwardBatch, output: ForwardOutput) -> dict[str, torch.Tensor]:
            assert output.logits is not None
            return {}

    class Scoring(EchoRunner):
        def execute_in_parts(
            self, batch: ForwardBatch, sampling: SamplingBatch | None, *, return_logits: bool = False
        ) -> Generator[None, None, Any]:
            output = yield from super().execute_in_parts(batch, sampling)
            output.logits = torch.zeros(1, 100) if return_logits else None
            return output

    worker = make_worker(rows, Scoring(), parts=[Reading()])
    worker.run(work(rows, [5], part=SplitPart(2, True, False), payloads={"a": 1}))
    assert worker.run(work(rows, [5], part=SplitPart(2, False, True), payloads={"a": 1})).tokens.tolist() == [6]


def test_parts_of_a_split_prefill(rows: ReqToTokenPool) -> None:
    runner = EchoRunner(layers=3)
    worker = make_worker(rows, runner)
    assert worker.run(work(rows, [5], part=SplitPart(2, True, False))).tokens.tolist() == []
    worker.run(work(rows, [50, 60]))
    assert worker.run(work(rows, [5], part=SplitPart(2, False, True))).tokens.tolist() == [6]
    assert runner.inputs == [[50, 60], [5]]
    with pytest.raises(RuntimeError, match="first parts are not there"):
        worker.run(work(rows, [5], part=SplitPart(2, False, True)))
