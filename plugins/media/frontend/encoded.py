"""Items that requests have encoded themselves: their states, checked, and copied row by row to the file in which they
travel. In a helper process, as all that reads what clients send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import EncodedStates
from pegboard.toolkit.media.inputs import StateDtype

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pegboard.toolkit.media.inputs import EncodedForm

PIECE = 1 << 20
"""Bytes that are checked and written at once: a multiple of every number's size."""
MOST = 1 << 31
"""Rows or numbers of a row, at most. What there may be of both together, bytes decide."""
NAMES: Mapping[str, StateDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' names of types."""


def copy_states(form: EncodedForm, received: Path, out: BinaryIO) -> EncodedStates:
    """Copy the states of a received file to `out`; what they are. Nothing of it is unpickled.

    Raises InvalidRequest for a file that does not hold one matrix of a known type, and for numbers that are not finite.
    """
    if form.format == "raw":
        states = _stated(form)
        _check_size(states, received.stat().st_size)
        _copy(states.dtype, _pieces(received), out)
        return states
    states, data = _tensor(received)
    for stated, found, what in ((form.dtype, states.dtype, "dtype"), (form.shape, states.shape, "shape")):
        if stated is not None and stated != found:
            raise _wrong(f"the tensor has the {what} {found}, and not {stated}")
    _copy(states.dtype, (data[at : at + PIECE] for at in range(0, len(data), PIECE)), out)
    return states


def _stated(form: EncodedForm) -> EncodedStates:
    if form.dtype is None or form.shape is None:
        raise _wrong("states in the format raw need dtype and shape")
    if not all(0 < one <= MOST for one in form.shape):
        raise _wrong(f"states cannot have the shape {list(form.shape)}")
    return EncodedStates(form.dtype, form.shape)


def _check_size(states: EncodedStates, size: int) -> None:
    if size != states.nbytes:
        raise _wrong(f"states of {states.dtype} {list(states.shape)} have {states.nbytes} bytes, and there are {size}")


def _pieces(received: Path) -> Iterator[bytes]:
    with received.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            yield piece


def _tensor(received: Path) -> tuple[EncodedStates, memoryview]:
    """Return the one matrix of a safetensors file."""
    from safetensors import SafetensorError, deserialize

    try:
        read: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize
        tensors = read(received.read_bytes())
    except SafetensorError:
        raise _wrong("this is not a safetensors file") from None
    if len(tensors) != 1:
        raise _wrong(f"a safetensors file of states has one tensor, and this one has {len(tensors)}")
    ((_, tensor),) = tensors
    shape, dtype = tensor["shape"], tensor["dtype"]
    if dtype not in NAMES:
        raise _wrong(f"states are of {', '.join(NAMES)}, and not {str(dtype)[:16]}")
    if len(shape) != 2 or not all(shape):
        raise _wrong(f"states have the shape [tokens, width], and not {str(list(shape))[:64]}")
    return EncodedStates(NAMES[dtype], (shape[0], shape[1])), memoryview(tensor["data"])


def _copy(dtype: StateDtype, pieces: Iterator[bytes | memoryview], out: BinaryIO) -> None:
    finite = _FINITE[dtype]
    for piece in pieces:
        if not finite(piece):
            raise _wrong("there are numbers among the states that are not finite")
        out.write(piece)


def _bfloat16_is_finite(data: bytes | memoryview) -> bool:
    exponents: NDArray[np.uint16] = np.frombuffer(data, "<u2") & np.uint16(0x7F80)
    return bool((exponents != 0x7F80).all())


_FINITE: Mapping[StateDtype, Callable[[bytes | memoryview], bool]] = {
    "float32": lambda data: bool(np.isfinite(np.frombuffer(data, "<f4")).all()),
    "float16": lambda data: bool(np.isfinite(np.frombuffer(data, "<f2")).all()),
    "bfloat16": _bfloat16_is_finite,
}


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(text, code="invalid_media")
