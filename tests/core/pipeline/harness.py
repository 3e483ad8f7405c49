"""A scheduler around a fake model that reads its context back through the slots.

The fake keeps, per slot, the token that was written there. The next token of a request is a hash of all tokens that
its row's slots hold, so a wrong slot, a page freed too early or a stale prefix changes the answer. `oracle` computes
the same from the tokens alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from pegboard.conformance.stage import stage_context
from pegboard.core.config.sections import SchedulerSection
from pegboard.core.frontend.intake import pack_ids
from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.messages import TokenizedRequest, TokenOutput
from pegboard.core.interfaces.prefix_cache import PrefixCacheContext
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.status import FinishReason
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.components import Components, Limits, StepHooks
from pegboard.core.pipeline.executor import Done, LocalExecutor
from pegboard.core.pipeline.memory import RUN, MemoryManager
from pegboard.core.pipeline.points import Points, encoded
from pegboard.core.pipeline.results import ResultProcessor
from pegboard.core.pipeline.scheduler import Scheduler
from pegboard.core.pipeline.shared import CommonPrefix
from pegboard.core.registry.registry import Registry
from pegboard.plugins.kv_tiers.api import NAME as TIERS
from pegboard.plugins.kv_tiers.api import PageMover, Tiers
from pegboard.plugins.prefill_in_parts.stage import PrefillInParts
from pegboard.plugins.row_outputs.api import Pooler
from pegboard.plugins.row_outputs.messages import NAME, Asked
from pegboard.plugins.row_outputs.stage import RowOutputs
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.plugins.speculation.figures import Counts
from pegboard.plugins.speculation.messages import NAME as SPECULATION
from pegboard.plugins.speculation.messages import DraftWork, Said
from pegboard.plugins.speculation.options import SpeculationSection
from pegboard.plugins.speculation.stage import Speculation
from pegboard.plugins.stop_expressions.stage import NAME as EXPRESSIONS
from pegboard.plugins.stop_expressions.stage import StopExpressions
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.sampling import tree

VOCAB = 251
CONFIG = SimpleNamespace(model=SimpleNamespace(hidden_states=True))
RUNNER = frozenset({"hidden_states", "input_logprobs"})
EOS = 7
EMPTY = -1


def next_token(context: NDArray[np.int64]) -> int:
    """A token from all tokens before it and their order."""
    weights = np.arange(1, context.shape[0] + 1, dtype=np.int64) * 31 % 1009 + 1
    return int((context * weights).sum() % VOCAB)


def oracle(prompt: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
    """What a request alone in the world would get."""
    tokens = list(prompt)
    out: list[int] = []
    while len(out) < n:
        token = next_token(np.array(tokens, np.int64))
        out.append(token)
        tokens.append(token)
        if token == EOS and not ignore_eos:
            break
    return out


def masked(tokens: list[int], work: ModelWorkerBatch) -> NDArray[np.int64]:
    """The tokens that were drawn, as far as masks allow them."""
    if work.sampling is not None and work.sampling.mask is not None:
        for at, bits in zip(work.sampling.mask.rows.tolist(), work.sampling.mask.bits, strict=True):
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            tokens[at] = int(allowed[tokens[at] % allowed.shape[0]])
    return np.array(tokens, np.int64)


class Seer(Speculator):
    """Foresees what the fake model says, right with `rate`, as a chain or among the branches of a random tree."""

    def __init__(self, rate: float, shape: str = "chain", nodes: int = 8) -> None:
        super().__init__(None, SpeculatorContext(ModelSpec("fake", VOCAB, 8, 4096, (), ()), nodes))
        self.rate, self.shape, self.max_nodes = rate, shape, nodes
        self.learnt: list[tuple[int, int]] = []

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        return tree.join(self.tree_of(row) for row in rows)

    def learn(self, rows: Sequence[DraftRow], offered: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        self.learnt += zip(offered.tolist(), gained.tolist(), strict=True)

    def tree_of(self, row: DraftRow) -> TokenTrees:
        rng = random.Random(f"{row.tokens.shape[0]} {row.tokens[-1]} {row.tokens[0]}")
        parents, tokens, contexts = [-1], [int(row.tokens[-1])], [row.tokens]
        for _ in range(rng.randrange(row.most)):
            parent = len(parents) - 1 if self.shape == "chain" or rng.random() < 0.6 else rng.randrange(len(parents))
            right = next_token(contexts[parent])
            token = right if rng.random() < self.rate else rng.randrange(VOCAB)
            if any(one == (parent, token) for one in zip(parents, tokens, strict=True)):
                continue
            parents.append(parent)
            tokens.append(token)
            contexts.append(np.append(contexts[parent], token))
        return TokenTrees(np.array([len(tokens)], np.int64), np.array(tokens, np.int64), np.array(parents, np.int64))


class FakeModel:
    """`execute` of a scheduler: writes tokens into slots, reads contexts back, hashes them; of a mask it takes the
    token that the hash points at.
    """

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        self.table = rows.host.copy() if rows.mirrored else rows.host
        self.last = np.full(rows.max_rows + 1, EMPTY, np.int64)
        self.slots = np.full(num_slots, EMPTY, np.int64)
        self.written = self.half = self.slots[:0]
        self.batches: list[ModelWorkerBatch] = []
        self.early: BatchResult | None = None
        """What the split prefill that is under way will answer."""
        self.fail_on: Callable[[ModelWorkerBatch], bool] = lambda work: False
        self.stage_parts: dict[str, Callable[..., Done[Any]]] = {}
        """What runs the work of stages, by name."""

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        self.batches.append(work)
        if work.table is not None:
            self.send_table(work.table)
        if self.fail_on(work):
            self.slots[work.out_cache_loc] = EMPTY  # what a failed pass leaves behind is undefined
            if work.part is not None:
                self.early = None
            raise RuntimeError("out of luck")
        self.check_slots(work)
        if work.part is None:
            return self.answer(work)
        # Some layers are computed in each part: the first one reads what is there by then, each one writes.
        if work.part.first:
            self.early, self.half = self.answer(work), self.written
        if self.early is None:
            raise RuntimeError("the first parts of this split are not there: they failed")
        self.slots[work.out_cache_loc] = self.half
        return self.early if work.part.last else BatchResult(np.empty(0, np.int64))

    def send_table(self, table: TableChanges) -> None:
        self.table.reshape(-1)[table.places] = table.slots

    def check_slots(self, work: ModelWorkerBatch) -> None:
        # What is in common is whole pages of old KV, at the same slots for all; the worker's table says so.
        table = self.table[work.rows, : work.common_prefix]
        assert (table == table[:1]).all(), "requests do not share what they are said to"
        assert work.common_prefix == 0 or work.common_prefix < work.seq_lens.min()
        assert 0 not in work.out_cache_loc, "page 0 is padding"
        assert len(set(work.out_cache_loc.tolist())) == len(work.out_cache_loc), "two tokens in one slot"

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        input_ids = work.input_ids.copy()
        if work.future_indices is not None:
            input_ids[work.future_indices] = self.last[work.rows[work.future_indices + len(work.rows) - len(input_ids)]]
        assert (input_ids >= 0).all(), "a token is computed that nobody knows"
        self.slots[work.out_cache_loc] = self.written = self.contents(work, input_ids)
        starts = np.cumsum(work.extend_lens) - work.extend_lens
        if work.trees is not None:
            return self.verify(work, work.trees)
        sampled = None if work.logits_indices is None else set(work.logits_indices.tolist())
        tokens = []
        for i, row in enumerate(work.rows.tolist()):
            context = self.slots[self.table[row, : work.seq_lens[i]]]
            assert EMPTY not in context, "a slot was read before it was written"
            last = int(starts[i] + work.extend_lens[i] - 1)
            if sampled is None or last in sampled:
                tokens.append(self.draw(context))
        sampled_tokens = masked(tokens, work)
        self.last[work.sampled_rows] = sampled_tokens
        return BatchResult(sampled_tokens)

    def verify(self, work: ModelWorkerBatch, trees: TokenTrees) -> BatchResult:
        """Draw a token at each node from the slots of what comes before it, and keep what was drawn; see Worker."""
        assert work.logits_indices is not None
        assert work.sampling is not None
        assert len(work.sampling.numbers) == len(work.sampling.steps) == len(work.logits_indices)
        ends, slots = np.cumsum(work.extend_lens), work.out_cache_loc[work.logits_indices]
        tokens = []
        for node, packed in enumerate(work.logits_indices.tolist()):
            index = int(np.searchsorted(ends, packed, "right"))
            way = tree.path(trees, node)
            before = int(work.seq_lens[index] - trees.counts[np.searchsorted(np.cumsum(trees.counts), node, "right")])
            context = np.concatenate([self.slots[self.table[work.rows[index], :before]], self.slots[slots[way]]])
            assert EMPTY not in context, "a slot was read before it was written"
            self.check_place(work, packed, len(context))
            tokens.append(self.draw(context))
        drawn = masked(tokens, work)
        accepted = tree.walk(trees, drawn)
        targets = np.repeat(tree.starts(trees.counts), accepted.counts) + tree.places(accepted.counts)
        self.slots[slots[targets]] = self.slots[slots[accepted.nodes]]
        return BatchResult(accepted.tokens, accepted=accepted)

    def draw(self, context: NDArray[np.int64]) -> int:
        """The token after a context, before masks."""
        return next_token(context)

    def check_place(self, work: ModelWorkerBatch, packed: int, length: int) -> None:
        """A node of a tree is the last token of a context of so many."""
        assert work.positions[packed] == length - 1

    def draft(self, work: DraftWork) -> TokenTrees:
        raise AssertionError("a model without a draft was asked for drafts")

    def contents(self, work: ModelWorkerBatch, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """What is kept of each token: here its id, once its position is seen to be right."""
        ends = np.cumsum(work.extend_lens) - 1
        assert work.tail_bits is not None or (work.positions[ends] == work.seq_lens - 1).all()
        return input_ids

    def launch(self, work: ModelWorkerBatch) -> Done[BatchResult]:
        return Done(self(work))


LAYERS = 6
IGNORE: dict[str, Any] = {"sampling": {"ignore_eos": True}}
"""For requests that are to get all their tokens."""


def prompts(n: int, *, seed: int = 0, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    """Mixed prompts, half of which share a prefix with another one."""
    rng = random.Random(seed)
    out: list[list[int]] = []
    for i in range(n):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(shortest, longest))]
        base = rng.choice(out)[: rng.randint(0, longest)] if out and i % 2 else []
        out.append((base + own)[: longest * 2])
    return out


class Harness:
    """A scheduler with real caches, allocators and policies, and the fake model. With `reserve` drafts are made beside
    the model, which writes to so many slots behind the newest token for them.
    """

    def __init__(
        self,
        *,
        cache: str = "radix",
        policy: str = "fcfs",
        page_size: int = 1,
        tokens: int = 4096,
        chunk: int | None = None,
        max_context_len: int = 1024,
        run: int = RUN,
        hooks: StepHooks | None = None,
        tokenizer: Any = None,
        processors: Sequence[Any] = (),
        parts: Mapping[str, Any] = MappingProxyType({}),
        model: type[FakeModel] | None = None,
        speculator: Speculator | None = None,
        speculation: Mapping[str, Any] = MappingProxyType({"adaptive": False}),
        reserve: int | None = None,
        mover: PageMover | None = None,
        joining: Sequence[Stage] = (),
        pooler: Pooler[Any] | None = None,
        split_prefill_layers: int = 0,
        lanes: int = 1,
        **scheduler: Any,
    ) -> None:
        registry = Registry.discover(())
        config = SchedulerSection(**{"max_running_requests": 16, **scheduler})
        allocator = _build(registry, "token_allocator", "stack", TokenAllocatorContext(tokens // page_size, page_size))
        services: dict[str, object] = {} if mover is None else {TIERS: Tiers(mover)}
        prefix_cache = _build(
            registry,
            "prefix_cache",
            cache,
            PrefixCacheContext(allocator, page_size, services),
        )
        chosen = _build(registry, "schedule_policy", policy, SchedulePolicyContext(prefix_cache, 0))
        max_context_len = min(max_context_len, tokens // page_size * page_size)
        overlap = config.loop == "overlap"
        self.rows = ReqToTokenPool(config.max_running_requests, max_context_len, page_size, mirrored=overlap)
        self.memory = MemoryManager(self.rows, allocator, prefix_cache, run=run)
        self.model = (model or FakeModel)(self.rows, (allocator.num_pages + 1) * page_size)
        context = stage_context(config=CONFIG, runner=RUNNER, provider=lambda *_: pooler, end=self._end)
        self.speculation = None if speculator is None else self._speculation(speculator, speculation, reserve)
        drafting = [] if self.speculation is None else [self.speculation]
        splitting = [PrefillInParts(split_prefill_layers, LAYERS)] if split_prefill_layers else []
        points = self.points = Points([*joining, *splitting, *drafting, RowOutputs(context), StopExpressions()])
        executor = LocalExecutor(
            self.model.launch,
            self.model,
            stages={
                SPECULATION: lambda work: Done(self.model.draft(work)),
                **self.model.stage_parts,
            },
            send_table=self.model.send_table,
            thread=overlap,
        )
        executor.lanes = lanes
        components = Components(
            self.memory,
            chosen,
            BatchBuilder(
                self.memory,
                processors,
                VOCAB,
                alone=processors,
                shared=CommonPrefix(self.rows, page_size),
                points=points,
            ),
            ResultProcessor(tokenizer, {EOS}, points),
            executor,
            hooks=hooks or StepHooks(),
            points=points,
            **{name: part for name, part in parts.items() if name != "clock"},
        )
        clock = {"clock": parts["clock"]} if "clock" in parts else {}
        self.scheduler = Scheduler(config, components, Limits(max_context_len, chunk, frozenset({EOS})), **clock)
        self.outputs: dict[str, list[TokenOutput]] = {}

    def _speculation(self, speculator: Speculator, asked: Mapping[str, Any], reserve: int | None) -> Speculation:
        device = None if reserve is None else cast(Any, SimpleNamespace(reserve=reserve, lookback=1))
        settings = SpeculationSection(**asked)
        return Speculation(speculator, settings, VOCAB, self._speculator_failed, device=device)

    def _speculator_failed(self, speculator: object) -> None:
        self.scheduler.components.culprits.counts["speculator", type(speculator).__name__] += 1

    @property
    def drafts(self) -> Counts:
        """What was counted of drafts."""
        assert self.speculation is not None
        return self.speculation.counts

    def submit(self, rid: str, prompt: Sequence[int], n: int = 8, *, stream: bool = False, **more: Any) -> Any:
        """Send one request; the scheduler's answer."""
        params = SamplingParams(**{"max_new_tokens": n, "temperature": 0.0, **more.pop("sampling", {})})
        wanted = [more.pop(name, None) for name in ("logprob_start", "return_hidden_states", "embed")]
        if wanted[0] is not None or any(wanted[1:]):
            more.setdefault("features", {})[NAME] = encoded(Asked(wanted[0], bool(wanted[1]), bool(wanted[2])))
        if params.stop_regex:
            more.setdefault("features", {})[EXPRESSIONS] = encoded(True)
        message = TokenizedRequest(rid=rid, prompt=pack_ids(prompt), sampling=params, stream=stream, **more)
        (reply,) = self.scheduler.receive([message])
        return reply

    def _end(self, req: Req, reason: FinishReason) -> None:
        self.points.end(req, reason)

    def step(self) -> list[TokenOutput]:
        """One step; the books must balance after it."""
        outputs = self.scheduler.step()
        for output in outputs:
            self.outputs.setdefault(output.rid, []).append(output)
        assert self.memory.books_error() is None
        self.memory.cache.check()
        return outputs

    def run(self, limit: int = 5000) -> None:
        """Until idle. Fails when that takes more than `limit` steps."""
        for _ in range(limit):
            if self.scheduler.idle:
                break
            self.step()
        else:
            raise AssertionError(f"not idle after {limit} steps: {self.scheduler.info()}")
        assert self.memory.idle_error() is None
        assert self.scheduler.counters.book_errors == 0

    def tokens(self, rid: str) -> list[int]:
        """All tokens sent for a request, in order."""
        return [token for output in self.outputs[rid] for token in output.token_ids]

    def finish(self, rid: str) -> dict[str, Any]:
        """The one finish reason of a request; it stands in its last output."""
        reasons = [output.finish_reason for output in self.outputs[rid] if output.finish_reason is not None]
        assert len(reasons) == 1, f"{rid} finished {len(reasons)} times"
        assert self.outputs[rid][-1].finish_reason is not None
        return reasons[0]


def said(output: TokenOutput) -> Said:
    """What an output tells of drafts."""
    raw = (output.features or {}).get(SPECULATION)
    return Said(0, 0) if raw is None else msgspec.msgpack.decode(raw, type=Said)


def _build(registry: Registry, contract: str, name: str, ctx: Any) -> Any:
    record = registry.get(contract, name)
    assert record is not None, f"{contract} {name} is not installed"
    cls = record.load()
    assert cls.supports(None, ctx) is None
    return cls(record.options_model()(), ctx)
