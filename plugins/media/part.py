"""Where batches run: media become states, and these take the place of token embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.media.work import NAME, EncodeWork

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.ahead import DeviceServices
    from pegboard.core.interfaces.executor import Pending
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.plugins.media.api import MediaEncoder
    from pegboard.plugins.media.states import EncodedMedia


class MediaPart(DevicePart):
    """Encodes with `encoder`, and keeps `encoded`, `reserved` bytes at most."""

    name = NAME

    def __init__(self, encoder: MediaEncoder, encoded: EncodedMedia, reserved: int) -> None:
        self.encoded = encoded
        self.device_bytes = reserved
        self._encoder = encoder

    def load(self) -> None:
        self._encoder.load()

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        assert isinstance(payload, tuple)
        batch.overlay = self.encoded.overlay(payload, put)

    def run(self, payload: object, services: DeviceServices) -> Pending[float]:
        assert isinstance(payload, EncodeWork)
        return self.encoded.encode(payload)
