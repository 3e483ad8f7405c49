"""The backend of the native runner: it packs adapters, and the runner computes what they add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterBackend, AdapterContext
from pegboard.plugins.cpu_native.api import NAME, Factors, NativeAdapter, NativeAdditions
from pegboard.toolkit.system.compute import rest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.adapters.api import AdapterWeights, LowRank, Put


class NativeAdapters(AdapterBackend[NoOptions]):
    """Keeps matrices in bfloat16, `b` with the scale in it. Small products and sums are float32."""

    def __init__(self, options: NoOptions, ctx: AdapterContext) -> None:
        super().__init__(options, ctx)
        self._sites = {site.number: site for site in ctx.sites}
        self._slots: list[NativeAdapter | None] = [None] * (ctx.slots + 1)

    @classmethod
    def supports(cls, options: NoOptions, ctx: AdapterContext) -> str | None:
        return None if ctx.computed_by == NAME else f"it is for the runner {NAME!r}"

    @property
    def device_bytes(self) -> int:
        return 0  # a slot refers to what is on the host

    def prepare(self, weights: AdapterWeights) -> NativeAdapter:
        factors = {number: [_factors(part) for part in parts] for number, parts in weights.sites.items()}
        return NativeAdapter(self._sites, factors)

    def host_bytes(self, prepared: object, matrices: int) -> int:
        # Ranks are filled up to 16.
        assert isinstance(prepared, NativeAdapter)
        return prepared.nbytes

    def activate(self, slot: int, prepared: object) -> None:
        assert isinstance(prepared, NativeAdapter)
        self._slots[slot] = prepared

    def clear(self, slot: int) -> None:
        self._slots[slot] = None

    def begin(self, slots: NDArray[np.int64], lens: NDArray[np.int64], put: Put) -> NativeAdditions | None:
        used = [slot for slot in np.unique(slots).tolist() if slot]
        adapters: list[NativeAdapter] = []
        which = np.full(len(self._slots), -1, np.int64)
        for slot in used:
            adapter = self._slots[slot]
            assert adapter is not None, f"slot {slot} is empty"
            which[slot] = len(adapters)
            adapters.append(adapter)
        return NativeAdditions(adapters, which[slots].repeat(lens)) if adapters else None


def _factors(part: LowRank) -> Factors:
    rest()
    return Factors(part.start, part.a.to(torch.bfloat16), (part.b.float() * part.scale).to(torch.bfloat16))
