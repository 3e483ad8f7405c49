"""A fake model with all that a step may bring beside tokens: logprobs, hidden states, pooled vectors, media, and KV
that is loaded from the host. What it says of a row follows from the whole context, so that a wrong row shows. The
stage `row_outputs` is the real one, and so is its device part.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.conformance.stage import stage_context
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.interfaces.step import StepLost
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.pipeline.executor import Done
from pegboard.plugins.kv_tiers.api import NAME
from pegboard.plugins.media.work import EncodeWork
from pegboard.plugins.row_outputs.api import Pooler, PoolSpan
from pegboard.plugins.row_outputs.part import RowPart
from pegboard.toolkit.sampling import tree
from tests.core.pipeline.harness import CONFIG, EMPTY, RUNNER, VOCAB, next_token
from tests.core.pipeline.tier_harness import LoadingModel, loads_of
from tests.plugins.media.media_harness import MediaModel, placed

STEPS_IN_DOUBT = 3
"""After a failure, so many steps may have been launched that read what the failed one was to write."""

Context = NDArray[np.int64]


def kept_as(values: Context, positions: Context, index: Context) -> Context:
    """What the model keeps of the tokens at `index`: the values themselves where positions are that on all axes."""
    return placed(values, positions) - placed(values, np.stack([index] * 3)) + values


def state(context: Context) -> int:
    """The model's state after a context."""
    return int((context * (np.arange(len(context)) * 13 + 5)).sum() % 997)


def logprob(context: Context, token: int) -> float:
    """Of a token after a context; exact in float32."""
    return -((state(context) * 31 + token * 7) % 1009) / 8


def top(context: Context) -> tuple[float, int]:
    """The likeliest token after a context, as the model says."""
    return -(state(context) % 8) / 8, state(context) % VOCAB


def hidden(context: Context) -> list[float]:
    """The hidden state after a context."""
    return [float(state(context)), float(len(context))]


class FakePooler(Pooler[Any]):
    """Adds up the states of the last `most` tokens of a prompt; None: of all."""

    def __init__(self, most: int | None) -> None:
        self.most = most

    def first(self, length: int) -> int:
        return 0 if self.most is None else max(0, length - self.most)

    def rows(self, span: PoolSpan) -> range:
        return range(max(0, self.first(span.length) - span.start), span.count)

    def reduce(self, hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        counts = [len(self.rows(span)) for span in spans]
        assert sum(counts) == hidden.shape[0], "rows are pooled that no span has"
        return torch.stack([torch.stack([one[:, 0].sum(), one.new_tensor(len(one))]) for one in hidden.split(counts)])

    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        return np.array([sum(one[0] for one in partials), sum(one[1] for one in partials), length], np.float32)

    def vector(self, context: Context) -> list[float]:
        """What a prompt is to get."""
        first, length = self.first(len(context)), len(context)
        return [float(sum(state(context[: i + 1]) for i in range(first, length))), float(length - first), float(length)]


def row_part(pooler: FakePooler) -> DevicePart:
    """The half of `row_outputs` that works where batches run."""
    return RowPart(stage_context(config=CONFIG, runner=RUNNER, provider=lambda *_: pooler))


class Late:
    """A step that is computed when its result is asked for."""

    def __init__(self, model: CompanyModel, work: ModelWorkerBatch) -> None:
        self.model, self.work = model, work

    def result(self) -> BatchResult:
        return self.model(self.work)


class CompanyModel(MediaModel, LoadingModel):
    """Computes as late as it may. What it finds wrong by itself is in `wrong`: the scheduler takes an exception for a
    failed pass, and may get by with it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.wrong: list[str] = []
        self.failed_loads = 0
        self.device_parts: dict[str, DevicePart] = {}
        self._doubt = 0
        self._contexts: list[Context] = []

    def launch(self, work: ModelWorkerBatch) -> Any:
        return Late(self, work)

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        self._doubt -= 1
        try:
            result = super().__call__(work)
            if work.part is not None and work.part.last:
                assert result.parts.keys() == work.payloads.keys() & self.device_parts.keys() - {NAME}, (
                    "the parts of a split differ"
                )
            return result
        except StepLost:
            self.failed_loads += 1
            self.early = None
            self._doubt = STEPS_IN_DOUBT
            raise
        except Exception as error:
            for load in loads_of(work):  # what a failed pass leaves behind is undefined
                self.slots.reshape(-1, self.mover.page_size)[load.device] = EMPTY
            self._note(error)
            raise

    def encode(self, work: EncodeWork) -> Done[float]:
        self._doubt -= 1
        try:
            if len(work.pieces) > 1 and self.flaky():
                for key in work.drop:
                    del self.encoded[key]
                raise RuntimeError("too much at once")
            return super().encode(work)
        except Exception as error:
            if not isinstance(error, OSError):
                self._note(error)
            self._doubt = STEPS_IN_DOUBT
            raise

    def _note(self, error: Exception) -> None:
        if self._doubt <= 0 and not isinstance(error, RuntimeError):
            self.wrong.append(f"{type(error).__name__}: {error}")
        self._doubt = STEPS_IN_DOUBT

    def check_place(self, work: ModelWorkerBatch, packed: int, length: int) -> None:
        """What is kept of a token says where it is."""

    def contents(self, work: ModelWorkerBatch, input_ids: Context) -> Context:
        index = np.repeat(work.prefix_lens, work.extend_lens) + tree.places(work.extend_lens)
        if work.trees is not None and work.logits_indices is not None:
            index[work.logits_indices] += tree.depths(work.trees) - tree.places(work.trees.counts)
        found = super().contents(work, input_ids)
        return found - placed(np.zeros_like(index), np.stack([index] * 3))

    def draw(self, context: Context) -> int:
        self._contexts.append(context.copy())
        return next_token(context)

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        self._contexts = []
        result = super().answer(work)
        if work.trees is None:
            result.logprobs = logprobs_of(self._contexts, result.tokens.tolist())
        if work.payloads:
            result.parts = self._parts(work)
        return result

    def verify(self, work: ModelWorkerBatch, trees: TokenTrees) -> BatchResult:
        result = super().verify(work, trees)
        assert result.accepted is not None
        tokens = np.full(len(self._contexts), VOCAB, np.int64)
        tokens[result.accepted.nodes] = result.accepted.tokens
        result.logprobs = logprobs_of(self._contexts, tokens.tolist())
        return result

    def _parts(self, work: ModelWorkerBatch) -> dict[str, dict[str, NDArray[Any]]]:
        """What device parts make of what a runner computes for them."""
        batch: Any = SimpleNamespace(logprob_rows=None, logprob_targets=None, logprob_requests=(), hidden_rows=None)
        output: Any = SimpleNamespace(prompt_logprobs=None, row_states=None)
        payloads = {name: work.payloads[name] for name in self.device_parts if name in work.payloads}
        for name, payload in payloads.items():
            self.device_parts[name].unpack(payload, batch, torch.from_numpy)
        if batch.logprob_rows is not None:
            rows, targets = batch.logprob_rows.tolist(), batch.logprob_targets.tolist()
            assert len(batch.logprob_requests) == len(rows)
            found = logprobs_of([self._context(work, row) for row in rows], targets)
            values, tops, top_ids = map(torch.from_numpy, (found.token_logprobs, found.top_values, found.top_ids))
            output.prompt_logprobs = LogprobOutput(values, tops, top_ids)
        if batch.hidden_rows is not None:
            output.row_states = torch.tensor([hidden(self._context(work, row)) for row in batch.hidden_rows.tolist()])
        computed = {name: self.device_parts[name].computed(one, batch, output) for name, one in payloads.items()}
        return {name: {key: one.numpy() for key, one in found.items()} for name, found in computed.items()}

    flaky: Any = staticmethod(lambda: False)
    """Whether several pieces cannot be encoded together this time."""

    def _context(self, work: ModelWorkerBatch, packed: int) -> Context:
        """All tokens up to one of a batch."""
        index = int(np.searchsorted(np.cumsum(work.extend_lens), packed, "right"))
        start = int(work.extend_lens[:index].sum())
        return self.slots[self.table[work.rows[index], : int(work.prefix_lens[index]) + packed - start + 1]]


def logprobs_of(contexts: Sequence[Context], tokens: Sequence[int]) -> Any:
    """A LogprobOutput, in numpy: what the host gets."""
    found: Any = LogprobOutput
    tops = [top(context) for context in contexts]
    return found(
        np.array([logprob(context, token) for context, token in zip(contexts, tokens, strict=True)], np.float32),
        np.array([[value] for value, _ in tops], np.float32).reshape(-1, 1),
        np.array([[token] for _, token in tops], np.int64).reshape(-1, 1),
    )
