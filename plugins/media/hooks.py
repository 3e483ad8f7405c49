"""What brings the halves of the stage, where the model and the config have media."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.media.choosing import ChosenMedia


class MediaHooks:
    """Brings the stage `media`."""

    _chosen: ChosenMedia | None = None

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        from pegboard.plugins.media.choosing import choose_media, media_stage
        from pegboard.plugins.media.stage import NoMedia

        self._chosen = choose_media(ctx, ctx.config.media)
        return [NoMedia() if self._chosen is None else media_stage(ctx, ctx.config.media, self._chosen)]

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        from pegboard.plugins.media.part import MediaPart
        from pegboard.plugins.media.states import EncodedMedia
        from pegboard.plugins.media.timing import timer_of

        if self._chosen is None:
            return []
        encoder = self._chosen.encoder
        timer = timer_of(encoder.ctx.device)
        encoded = EncodedMedia(encoder, ctx.spec.hidden_size, encoder.ctx.dtype, ctx.scratch, timer)
        return [MediaPart(encoder, encoded, ctx.config.media.cache_bytes)]
