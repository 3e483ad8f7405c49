"""The API process's half: media of prompts are prepared, and laid out among their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.plugins.media.frontend.building import build_media
from pegboard.plugins.media.work import NAME
from pegboard.toolkit.media.service import MediaService

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.client import ModelInfo
    from pegboard.core.interfaces.frontend import FrontendContext
    from pegboard.plugins.media.frontend.prompts import MediaFrontend
    from pegboard.plugins.media.options import MediaSection


class MediaFrontendStage(FrontendStage):
    """Makes what prepares media when an engine is there that takes some. It stays when the engine starts anew."""

    name = NAME

    def __init__(self, ctx: FrontendContext, section: MediaSection) -> None:
        self._ctx = ctx
        self._section = section
        self._made: MediaFrontend | None = None

    def expander(self, info: ModelInfo) -> MediaFrontend | None:
        """Return what prepares media; None where the model takes none. Raises PegboardError where there can be no
        folder for their files.
        """
        if not any(f"{NAME}.{kind}" in info.features for kind in ("image", "video")):
            return None
        said = info.stages.get(NAME, {})
        if self._made is None:
            self._made = build_media(self._ctx, self._section, said.get("piece_tokens"))
        return None if self._made is None else self._made.with_features(info.features, said.get("width", 0))

    def service(self, info: ModelInfo) -> MediaService | None:
        found = self.expander(info)
        return None if found is None else MediaService(found.processor, found.figures)

    def figures(self, info: ModelInfo) -> Mapping[str, object]:
        found = self.expander(info)
        return {} if found is None else found.figures()

    def max_body_bytes(self, info: ModelInfo) -> int:
        return 0 if self.expander(info) is None else self._section.max_body_bytes

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
