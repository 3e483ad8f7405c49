"""The suite of MediaProcessor on the kit's toy, which needs no library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pegboard.conformance.checkpoints import VOCAB_SIZE
from pegboard.conformance.rig.media_toy import KEY, ToyProcessor
from pegboard.plugins.media.suite.media_processor import MediaProcessorContract
from pegboard.toolkit.media.inputs import MediaKind
from tests.fakes.toy_media import ppm, toy_settings


def noise(*shape: int) -> bytes:
    return ppm(np.random.default_rng(len(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8))


class TestToyProcessor(MediaProcessorContract):
    factory = ToyProcessor
    provides = frozenset({"encoded"})
    config = {KEY: toy_settings(axes=3)}
    placeholders = {"image": VOCAB_SIZE + 1, "video": VOCAB_SIZE + 2}

    def media(self, kind: MediaKind) -> Sequence[bytes]:
        return [noise(9, 17), noise(20, 8)] if kind == "image" else [noise(3, 9, 17), noise(2, 20, 8)]
