"""Where batches run: what a prefix cache has promised is loaded while the first layers are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.interfaces.step import StepLost
from pegboard.plugins.kv_tiers.api import NAME, PageLoad
from pegboard.plugins.kv_tiers.loading import Loading, WatchedAttention

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.plugins.kv_tiers.loading import HostLoads

R = TypeVar("R")


class TierPart(DevicePart):
    """Loads host pages for a batch, from `source`, which is set once there is a host pool.

    The runner waits for each layer (capability `layer_watch`), or else the attention that the network calls; before a
    runner that computes attention itself, and before the first part of a split prefill, all layers are waited for.
    """

    name = NAME
    loads = True

    def __init__(self, runner: frozenset[str]) -> None:
        self.source: HostLoads | None = None
        self._by_runner = "layer_watch" in runner
        self._by_layer = self._by_runner or "own_attention" not in runner

    def execute(self, payload: object, batch: ForwardBatch, run: Callable[[], R]) -> R:
        assert isinstance(payload, tuple)
        loads = [load for load in payload if isinstance(load, PageLoad)]
        if self.source is None:
            raise StepLost("a batch wants pages of the host, but there is no host pool")
        by_layer = self._by_layer and batch.forward_mode is not ForwardMode.SPLIT_PREFILL
        loading = self.source.begin(loads, ahead=by_layer)
        try:
            if by_layer:
                self._watch(batch, loading)
            else:
                loading.before_all()
            result = run()
            loading.before_all()  # what drafts reads further layers
        finally:
            loading.end()  # even where the batch raised: its pages may be given away then
        return result

    def _watch(self, batch: ForwardBatch, loading: Loading) -> None:
        if self._by_runner:
            batch.watch = loading
        else:
            batch.attn_backend = WatchedAttention(batch.attn_backend, loading)
