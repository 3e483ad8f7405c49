"""Tokens ahead in a plan, and what device parts of stages may ask of a pass and of the model. See `stage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.contract import Contract, Ctx, T
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.model_runner import ModelEnds
    from pegboard.core.interfaces.on_device import Bring
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampling import SamplingBatch
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.core.interfaces.weights import WeightStore


class AheadRoom(Protocol):
    """Running requests that compute one token in the step that is planned, and what there is for tokens ahead of it.

    Arrays int64 [requests]: `rows` in the row table, `known_lens` (tokens known, the newest included), the `newest`
    tokens, and the `most` nodes that a tree may have, its root included. 1: none ahead of this request. `running`
    counts all requests that run, those that compute several tokens included.
    """

    @property
    def running(self) -> int: ...
    @property
    def reqs(self) -> Sequence[Req]: ...
    @property
    def rows(self) -> NDArray[np.int64]: ...
    @property
    def known_lens(self) -> NDArray[np.int64]: ...
    @property
    def newest(self) -> NDArray[np.int64]: ...
    @property
    def most(self) -> NDArray[np.int64]: ...

    def wish(self, index: int, tokens: int) -> int:
        """Get slots for a request's first `tokens` tokens, from memory that no request needs. Return for how many it
        has slots. Where its row is too short for all of them it gets none.
        """

    def ask(self, stage: str, payload: object) -> object:
        """Run work of a stage (`DevicePart.run`), with all slots in the row table, and return its result. Raises what
        it raises.
        """


@dataclass(frozen=True, slots=True)
class Wants:
    """What a device part reads of a pass: `logits` of the sampled rows, and states at these places (see Taps)."""

    logits: bool = False
    states: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """A pass that has computed `trees`. `rows` int64 [requests] in the row table; `drawn` int64 [nodes] on the host is
    what was sampled at each node. `logits` float32 [nodes, vocab] are the processed ones, masks included, None where no
    part wants them; `sampling` has a row per node: its request's parameters and seed, and its own step.
    """

    trees: TokenTrees
    rows: NDArray[np.int64]
    drawn: NDArray[np.int64]
    logits: torch.Tensor | None
    sampling: SamplingBatch | None


@dataclass(frozen=True, slots=True)
class DeviceServices:
    """What the core offers the work of a stage, where batches run: the memory of KV, and `row_table` int32
    [rows, max_context], which maps a request's row and a position to a slot of it. `further_tables` are those of other
    KV groups, for the part that adds their views.
    """

    pool: KVPool
    row_table: torch.Tensor
    further_tables: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are read. `ends` lends its embedding and head, `weights` these; both raise Unsupported if
    the runner cannot. `attention` attends over `KVLayers`, too; `bring` brings arrays to the device.
    """

    ends: Callable[[], ModelEnds]
    weights: Callable[[], WeightStore]
    attention: AttentionBackend
    device: torch.device
    bring: Bring


@dataclass(frozen=True, slots=True)
class KVLayersContext:
    """What is known before attention, runner and pool are chosen. `config` is the EngineConfig; for `provider` see
    StageContext.
    """

    config: Any
    spec: ModelSpec
    model: ModelContext
    provider: Callable[[Contract[T, Ctx], Ctx], T]


@dataclass(frozen=True, slots=True)
class KVLayers:
    """What a plugin needs of an engine: further `layers` of the KV pool, in its first KV group, with ids after the
    model's. Their memory starts as zeros, and their KV of a token depends on the tokens up to it alone: it stays with
    cached prefixes.
    """

    layers: tuple[LayerSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class LogPart:
    """What a stage adds to the log line of a step: the end of its text, and fields of its record."""

    text: str
    fields: Mapping[str, object]
