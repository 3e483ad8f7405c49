"""Arrays, and payloads that have some, as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

_PLAIN = "biuf"


def _enc(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.kind in _PLAIN:
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def array(value: object) -> NDArray[np.generic]:
    """Return the array that `pack` has made this of. Raises msgspec.ValidationError for anything else."""
    kind, shape, data = msgspec.convert(value, tuple[str, list[int], bytes])
    dtype = np.dtype(kind)
    if dtype.kind not in _PLAIN:
        raise ValueError(f"arrays of {kind} are not sent")
    return np.frombuffer(data, dtype).reshape(shape).copy()  # one that can be written, as torch wants it


def _dec(kind: type, value: object) -> object:
    if kind is np.ndarray or get_origin(kind) is np.ndarray:
        return array(value)
    raise TypeError(f"{kind} is not read")


pack: Callable[[object], bytes] = msgspec.msgpack.Encoder(enc_hook=_enc).encode


def unpack(data: bytes, kind: type) -> object:
    """Return a value of this type. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_dec)
