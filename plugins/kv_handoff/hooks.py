"""What brings the stage, where the config names gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.kv_handoff import KV_TRANSFER
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.stage import Stage, StageContext
    from pegboard.plugins.kv_handoff.api.transfer import KVTransfer


class HandoffHooks:
    """Brings the stage `kv_handoff`, which gates find in their context."""

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        if not ctx.config.gates:
            return []
        from pegboard.plugins.kv_handoff.regions import regions_of
        from pegboard.plugins.kv_handoff.stage import KVHandoff

        def transfer(pool: KVPool) -> KVTransfer:
            return ctx.provider(KV_TRANSFER, KVTransferContext(regions_of(pool)))

        return [KVHandoff(ctx.spec.vocab_size, transfer, ctx.failed)]
