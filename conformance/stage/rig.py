"""What the suite of stages runs a stage in: a scheduler around a model that reads its context back through slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pegboard.core.config.sections import SchedulerSection
from pegboard.core.frontend.intake import pack_ids
from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.messages import AbortRequest, Rejected, TokenizedRequest, TokenOutput
from pegboard.core.interfaces.prefix_cache import PrefixCacheContext
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.step import CoreServices, TokenValues
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.components import Components, Limits
from pegboard.core.pipeline.executor import Done, LocalExecutor
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.points import Points, encoded
from pegboard.core.pipeline.results import ResultProcessor
from pegboard.core.pipeline.scheduler import Scheduler
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.sampling import tree

VOCAB = 251
CONTEXT = 512
MAX_STEPS = 2000

Parts = Mapping[str, NDArray[Any]]
Compute = Callable[[object, ModelWorkerBatch], Parts]
"""What the device part of the stage would compute of a payload."""


def next_token(context: NDArray[np.int64]) -> int:
    """Return a token from all tokens before it and their order."""
    weights = np.arange(1, context.shape[0] + 1, dtype=np.int64) * 31 % 1009 + 1
    return int((context * weights).sum() % VOCAB)


class HashModel:
    """Writes tokens into slots, and draws the next ones by what rows' slots hold. Raises where `fails` says so."""

    def __init__(self, rows: ReqToTokenPool, num_slots: int, compute: Compute) -> None:
        self._table = rows.host.copy() if rows.mirrored else rows.host
        self._last = np.zeros(rows.max_rows + 1, np.int64)
        self._slots = np.zeros(num_slots, np.int64)
        self._compute = compute
        self.fails: Callable[[ModelWorkerBatch], bool] = lambda work: False
        self.work_fails: Callable[[object], bool] = lambda payload: False

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        if work.table is not None:
            self.send_table(work.table)
        if self.fails(work):
            raise RuntimeError("the model of the suite fails here")
        ids = work.input_ids.copy()
        if work.future_indices is not None:
            ids[work.future_indices] = self._last[work.rows[work.future_indices + len(work.rows) - len(ids)]]
        self._slots[work.out_cache_loc] = ids
        parts = {name: self._compute(payload, work) for name, payload in work.payloads.items()}
        if work.trees is not None:
            return self._verify(work, work.trees, parts)
        ends = np.cumsum(work.extend_lens) - 1
        sampled = set(ends.tolist() if work.logits_indices is None else work.logits_indices.tolist())
        tokens = [
            next_token(self._slots[self._table[row, : work.seq_lens[index]]])
            for index, row in enumerate(work.rows.tolist())
            if int(ends[index]) in sampled
        ]
        self._last[work.sampled_rows] = tokens
        zeros: Any = np.zeros(len(tokens), np.float32)
        return BatchResult(np.array(tokens, np.int64), logprobs=LogprobOutput(zeros), parts=parts)

    def _verify(self, work: ModelWorkerBatch, trees: TokenTrees, parts: Mapping[str, Parts]) -> BatchResult:
        """Draw a token at each node, after what its path says, and keep what agrees with that."""
        assert work.logits_indices is not None
        slots, ends, firsts = (
            work.out_cache_loc[work.logits_indices],
            np.cumsum(work.extend_lens),
            np.cumsum(trees.counts),
        )
        drawn = []
        for node, packed in enumerate(work.logits_indices.tolist()):
            index = int(np.searchsorted(ends, packed, "right"))
            count = int(trees.counts[np.searchsorted(firsts, node, "right")])
            before = self._slots[self._table[work.rows[index], : work.seq_lens[index] - count]]
            drawn.append(next_token(np.concatenate([before, self._slots[slots[tree.path(trees, node)]]])))
        accepted = tree.walk(trees, np.array(drawn, np.int64))
        targets = np.repeat(tree.starts(trees.counts), accepted.counts) + tree.places(accepted.counts)
        self._slots[slots[targets]] = self._slots[slots[accepted.nodes]]
        self._last[work.sampled_rows] = accepted.tokens[np.cumsum(accepted.counts) - 1]
        zeros: Any = np.zeros(len(drawn), np.float32)
        return BatchResult(accepted.tokens, LogprobOutput(zeros), accepted, parts=parts)

    def keep(self, slots: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
        """Have tokens in slots, as if they had been computed."""
        self._slots[slots] = tokens

    def send_table(self, table: TableChanges) -> None:
        self._table.reshape(-1)[table.places] = table.slots

    def launch(self, work: ModelWorkerBatch) -> Done[BatchResult]:
        return Done(self(work))

    def works(self, work: Callable[[object], object]) -> Callable[[object], Done[object]]:
        """Return what does work of a stage, or raises where `work_fails` says so."""

        def does(payload: object) -> Done[object]:
            if self.work_fails(payload):
                raise RuntimeError("the work of the stage fails here")
            return Done(work(payload))

        return does


class StageRig:
    """A scheduler with stages, its outputs by request, and the requests that it has had."""

    def __init__(
        self,
        stages: Sequence[Stage],
        compute: Compute,
        *,
        loop: str = "normal",
        tokens: int = 512,
        work: Callable[[object], object] | None = None,
    ) -> None:
        registry = Registry.discover(())
        config = SchedulerSection.model_validate({"max_running_requests": 8, "loop": loop})
        allocator = _build(registry, "token_allocator", "stack", TokenAllocatorContext(tokens, 1))
        cache = _build(registry, "prefix_cache", "radix", PrefixCacheContext(allocator, 1))
        rows = ReqToTokenPool(8, min(CONTEXT, tokens), 1, mirrored=loop == "overlap")
        memory = MemoryManager(rows, allocator, cache)
        self.model = HashModel(rows, tokens + 1, compute)
        does = {} if work is None else {stage.name: self.model.works(work) for stage in stages}
        executor = LocalExecutor(
            self.model.launch, self.model, stages=does, send_table=self.model.send_table, thread=loop == "overlap"
        )
        points = Points(stages)
        self.components = Components(
            memory,
            _build(registry, "schedule_policy", "fcfs", SchedulePolicyContext(cache, 0)),
            BatchBuilder(memory, (), VOCAB, points=points),
            ResultProcessor(None, points=points),
            executor,
            points=points,
        )
        self.scheduler = Scheduler(config, self.components, Limits(rows.host.shape[1], 16))
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.reqs: dict[str, Req] = {}

    def submit(self, rid: str, prompt: Sequence[int], length: int, features: Mapping[str, object]) -> None:
        """Send a request that asks stages for these features."""
        sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
        raw: dict[str, msgspec.Raw] = {name: encoded(value) for name, value in features.items()}
        message = TokenizedRequest(rid=rid, prompt=pack_ids(prompt), sampling=sampling, stream=True, features=raw)
        message.logprobs = 1 if features else None
        (reply,) = self.scheduler.receive([message])
        assert not isinstance(reply, Rejected), f"a request with {dict(features)} is refused: {reply}"
        self.reqs[rid] = self.scheduler.requests.alive[rid]

    def abort(self, rid: str) -> None:
        self.scheduler.receive([AbortRequest(rid=rid)])

    def step(self) -> None:
        for output in self.scheduler.step():
            self.outputs.setdefault(output.rid, []).append(output)

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"requests do not end within {MAX_STEPS} steps: {list(self.scheduler.requests.alive)}")

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self.outputs.get(rid, ()) for token in output.token_ids]

    def rows(self, rid: str, stage: str) -> list[msgspec.Raw]:
        """Return what a stage has sent with each token of a request."""
        return [row for output in self.outputs[rid] for row in (output.rows or {}).get(stage, ())]

    def begin_computed(self, core: CoreServices, rid: str, token: int, rows: Mapping[str, bytes]) -> None:
        """Let a request that waits go on as if another engine had computed its prompt and drawn a token."""
        req = self.reqs[rid]
        self.scheduler.planner.drop(req)
        assert core.reserve(req), "the rig has no memory left"
        self.model.keep(core.reserved_slots(req), req.prompt_ids)
        core.begin_computed(req, req.input_len, token, TokenValues(logprob=0.0, rows=rows))

    def close(self) -> None:
        self.components.executor.close()


def _build(registry: Registry, contract: str, name: str, ctx: Any) -> Any:
    record = registry.get(contract, name)
    assert record is not None, f"{contract} {name} is not installed"
    return record.load()(record.options_model()(), ctx)
