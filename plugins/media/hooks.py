"""What brings the halves of the stage, where the model and the config have media."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.media.options import MediaFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import FrontendContext, FrontendStage
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.media.choosing import ChosenMedia


class MediaHooks:
    """Brings the stage `media`."""

    def __init__(self, options: Options) -> None:
        self._section = options.section(MediaFields).media
        self._chosen: ChosenMedia | None = None

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        from pegboard.plugins.media.choosing import choose_media, media_stage
        from pegboard.plugins.media.stage import NoMedia

        self._chosen = choose_media(ctx, self._section)
        return [NoMedia() if self._chosen is None else media_stage(ctx, self._section, self._chosen)]

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
        return [MediaPart(encoder, encoded, self._section.cache_bytes)]

    @hookimpl
    def frontend_stages(self, ctx: FrontendContext) -> list[FrontendStage]:
        from pegboard.plugins.media.frontend.stage import MediaFrontendStage

        return [MediaFrontendStage(ctx, self._section)]
