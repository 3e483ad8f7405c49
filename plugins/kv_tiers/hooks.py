"""What kv_tiers brings to an engine: a service for the prefix cache, and the part that loads for batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.kv_tiers.api import NAME

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import MemoryContext
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.stage import DevicePart, StageContext
    from pegboard.plugins.kv_tiers.part import TierPart


class TierHooks:
    """Brings the device part `kv_tiers`, and what a prefix cache with tiers finds under that name."""

    def __init__(self, options: Options) -> None:
        self._part: TierPart | None = None

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        from pegboard.plugins.kv_tiers.part import TierPart

        self._part = TierPart(ctx.runner)
        return [self._part]

    @hookimpl
    def memory_services(self, ctx: MemoryContext) -> dict[str, object]:
        from pegboard.plugins.kv_tiers.build import build_tiers

        tiers = build_tiers(ctx)
        if tiers is None:
            return {}
        assert self._part is not None, "device parts are asked for before memory is sized"
        self._part.source = tiers.loads
        return {NAME: tiers}
