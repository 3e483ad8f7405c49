"""ScheduleBatch and ModelWorkerBatch: what the scheduler decided, and what a worker needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import ForwardMode
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampling import LogprobRequest, SamplingRow
    from pegboard.core.interfaces.trees import TokenTrees


@dataclass(frozen=True, slots=True)
class TokenMask:
    """What may be sampled. `rows` int64 [n] of the sampled rows that are constrained, and for each of them `bits` int32
    [n, ceil(vocab / 32)]: bit i%32 of word i//32 for token i.
    """

    rows: NDArray[np.int64]
    bits: NDArray[np.int32]


@dataclass(slots=True)
class SamplingInfo:
    """Host side of the sampled rows' parameters; SamplingBatch says what they mean.

    `numbers` is a structured array [sampled] with the fields of SAMPLING_ROW, `steps` int64 [sampled]. `version`
    changes only when the numbers do, so that a worker may keep what it made of them between two decode steps.
    """

    version: int
    numbers: NDArray[np.void]
    steps: NDArray[np.int64]
    logprobs: tuple[LogprobRequest | None, ...] = ()
    rows: tuple[SamplingRow, ...] = ()
    mask: TokenMask | None = None


@dataclass(slots=True)
class ScheduleBatch:
    """What the scheduler decided to run in one step; step hooks see it.

    Arrays int64, one entry per request of `reqs`: `seq_lens` (KV after this step, that of tokens ahead included),
    `extend_lens` (new tokens; 1 for a decode, and one more per token ahead) and `prefix_lens` (KV before the step).
    `decoding` is the number of requests at the end of `reqs` that only decode. `partial` holds the requests that get KV
    but no token: their prompt is not finished by this step, or they sample nothing (`Req.samples`).

    `trees` has the tokens ahead of all requests that a token is sampled for; None in a step without any.

    `planned_at` and `committed_at` are the clock's times before the batch was decided and after its results were
    taken. Once committed, `tokens` int64 [sampled] are what was sampled (-1 for a request that had ended meanwhile) and
    `intervals` float64 [sampled] the seconds since each of these requests got its token before (NaN for a first one),
    in the order of `reqs` without `partial`. With tokens ahead a request may have gained several: `gained` int64
    [sampled] says how many, and `tokens` are packed, request after request (-1 for one that it had no use for, behind
    its end).
    """

    bid: int
    forward_mode: ForwardMode
    reqs: list[Req]
    seq_lens: NDArray[np.int64]
    extend_lens: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    decoding: int = 0
    partial: frozenset[str] = frozenset()
    planned_at: float = 0.0
    committed_at: float = 0.0
    tokens: NDArray[np.int64] | None = None
    intervals: NDArray[np.float64] | None = None
    trees: TokenTrees | None = None
    gained: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def num_tokens(self) -> int:
        """New tokens in this step."""
        return int(self.extend_lens.sum())

    @property
    def prompt_tokens(self) -> int:
        """New tokens of requests that do not only decode: of prompts, and of outputs that are computed again."""
        return int(self.extend_lens[: len(self.reqs) - self.decoding].sum())

    @property
    def token_intervals(self) -> NDArray[np.float64] | None:
        """Seconds per gained token, once committed: tokens that came together share the time before them."""
        if self.intervals is None or self.gained is None:
            return self.intervals
        kept = self.gained > 0
        return (self.intervals[kept] / self.gained[kept]).repeat(self.gained[kept])


class BatchExtras:
    """What stages bring along with a batch (`Stage.pack`). The model finds it in `ForwardBatch.extras`, under names
    ``"<stage>.<what>"``, with arrays as tensors on its device.
    """

    def __init__(self, requests: int, tokens: int, values: dict[str, object] | None = None) -> None:
        self.values: dict[str, object] = {} if values is None else values
        """All of it."""
        self._requests = requests
        self._tokens = tokens

    def per_request(self, name: str, values: NDArray[np.generic]) -> None:
        """Bring an array [requests, ...] of numbers or bools with one entry per request, in the order of `batch.reqs`.

        Raises TypeError for what is not such an array, and ValueError for another length or a name that is taken.
        """
        self._add_array(name, values, self._requests, "request of batch.reqs")

    def per_token(self, name: str, values: NDArray[np.generic]) -> None:
        """Bring an array [tokens, ...] with one entry per new token, request after request in the order of
        `batch.reqs`: `extend_lens[i]` entries for request i, of which the last ones are those ahead. Raises as
        `per_request` does.
        """
        self._add_array(name, values, self._tokens, "new token (batch.extend_lens of each request)")

    def whole(self, name: str, value: object) -> None:
        """Bring one value for the whole batch. Raises ValueError for a name that is taken."""
        if name in self.values:
            raise ValueError(f"extras {name!r}: the name is taken; begin it with your stage's name")
        self.values[name] = value

    def _add_array(self, name: str, values: object, count: int, what: str) -> None:
        if not isinstance(values, np.ndarray) or values.ndim == 0 or values.dtype.kind not in "biuf":
            shown = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
            raise TypeError(f"extras {name!r}: expected a numpy array of numbers or bools, got {shown}")
        if values.shape[0] != count:
            raise ValueError(f"extras {name!r}: expected {count} entries, one for each {what}, got {values.shape[0]}")
        self.whole(name, values)


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Entries of the row table that are new: `places` int64 [n] (row x width + position) and `slots` int32 [n]."""

    places: NDArray[np.int64]
    slots: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One part of a prefill that runs some layers at a time. All parts carry one batch; decodes may run between them.
    So many `layers` are computed in this part; in the last one, which samples, all that are left.
    """

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """One request's share of a prefill: `extend_len` new tokens after `prefix_len`; `partial`: its prompt goes on;
    `fresh`: it has just got its row. `loaded_from` counts the loaded tokens of its prefix by origin.
    """

    req: Req
    prefix_len: int
    extend_len: int
    partial: bool
    fresh: bool = False
    loaded_from: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work of a stage beside batches: `payload`, plain values and arrays, is for its DevicePart. `table` are changes of
    the row table since the last batch.
    """

    stage: str
    payload: object
    table: TableChanges | None = None


@dataclass(slots=True)
class ModelWorkerBatch:
    """What a worker needs of a ScheduleBatch: arrays and plain values; no Req, no cache, no allocator.

    `input_ids`, `positions` ([axes, tokens] where a prompt with TokenPositions is computed) and `out_cache_loc` int64
    [tokens]; `rows`, `seq_lens`, `extend_lens`, `prefix_lens`
    int64 [batch]; `logits_indices` int64 [sampled] or None for every token (decode). `sampling` is None when nothing is
    sampled; `sampled_rows` int64 [sampled] are the row table's rows of the requests that a token is sampled for.

    `future_indices` int64 [n] are the packed tokens whose id only the worker knows: it is the one it sampled last for
    the token's row; `input_ids` is -1 there. `table` are changes of the row table since the batch before. `part` is set
    for a part of a split prefill.

    With tokens ahead `trees` are those of the sampled rows, whose `sampling` and `logits_indices` have an entry per
    node. Branches need `tail_lens` int64 [batch] and `tail_bits` int64 [tokens], see ForwardBatch; chains leave them
    None.

    `common_prefix`: see ForwardBatch. `extras`: see BatchExtras. `payloads` are for device parts, by their names: those
    of stages, and for `PrefixCache.loader` a tuple of what has to be loaded for this batch.
    """

    bid: int
    forward_mode: ForwardMode
    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    extend_lens: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    out_cache_loc: NDArray[np.int64]
    logits_indices: NDArray[np.int64] | None
    sampling: SamplingInfo | None
    sampled_rows: NDArray[np.int64]
    future_indices: NDArray[np.int64] | None = None
    table: TableChanges | None = None
    part: SplitPart | None = None
    trees: TokenTrees | None = None
    tail_lens: NDArray[np.int64] | None = None
    tail_bits: NDArray[np.int64] | None = None
    common_prefix: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    payloads: dict[str, object] = field(default_factory=dict)
