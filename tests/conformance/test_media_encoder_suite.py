"""The suite of MediaEncoder on an encoder that has nothing in common with a vision transformer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pegboard.plugins.media.api import MediaItem
from pegboard.plugins.media.suite.media_encoder import MediaEncoderContract
from tests.fakes.colour_encoder import ColourEncoder, colour_items, colour_model


class TestColours(MediaEncoderContract):
    factory = ColourEncoder

    def make_model(self, directory: Path) -> Path:
        return colour_model(directory)

    def make_items(self) -> Sequence[MediaItem]:
        return colour_items()
