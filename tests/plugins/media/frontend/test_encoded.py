"""Items that requests have encoded themselves: what travels, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import EncodedStates, MediaItem, MediaLimits
from pegboard.plugins.media.frontend.prepare import Preparer
from pegboard.toolkit.media.inputs import EncodedForm, MediaInput, StateDtype
from tests.plugins.media.frontend.scene import preparing

WIDTH = 24
DTYPES: tuple[StateDtype, ...] = ("float32", "float16", "bfloat16")


def states(rows: int = 6, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    made = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, dtype))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def stated(data: bytes, **form: Any) -> MediaInput:
    kind = form.pop("kind", "image")
    return MediaInput(kind=kind, data=data, encoded=EncodedForm(**{"grid": (1, 2, 3), **form}), place="there")


def in_rows(tensor: torch.Tensor, **form: Any) -> MediaInput:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return stated(raw(tensor), **{"format": "raw", "dtype": dtype, "shape": shape, **form})


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparer]:
    limits = MediaLimits(resized_pixels=2**20)
    with preparing(tmp_path_factory.mktemp("media"), limits=limits) as one:
        yield one


def item_of(preparer: Preparer, media: MediaInput) -> MediaItem:
    with preparer.prepared_now([media]) as [one]:
        return one.item


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["raw", "safetensors"])
def test_states_travel_as_they_are(preparer: Preparer, form: str, dtype: StateDtype) -> None:
    tensor = states(dtype=dtype)
    media = in_rows(tensor) if form == "raw" else stated(save({"any name": tensor}))
    with preparer.prepared_now([media]) as [one]:
        assert (preparer.store.directory / one.item.file).read_bytes() == raw(tensor)
        assert one.item.encoded == EncodedStates(dtype, (6, WIDTH))
        assert (one.item.shape, one.item.grid, one.item.pieces) == ((1, 16, 24, 3), (1, 2, 3), 1)
        assert preparer.store.bytes == one.item.encoded.nbytes == len(raw(tensor))


def test_videos_have_their_times(preparer: Preparer) -> None:
    item = item_of(preparer, in_rows(states(12), kind="video", grid=(2, 2, 3), times=(0.0, 0.5)))
    assert (item.kind, item.pieces, item.times, item.shape) == ("video", 2, (0.0, 0.5), (2, 16, 24, 3))


def test_a_long_file_is_copied_in_pieces(preparer: Preparer) -> None:
    """Longer than what is checked at once, with a number that is not finite in the last piece."""
    rows = states(2**15)
    for tensor in (rows.half(), rows.bfloat16()):
        with preparer.prepared_now([in_rows(tensor, grid=(1, 2**7, 2**8))]) as [one]:
            assert (preparer.store.directory / one.item.file).read_bytes() == raw(tensor)
        tensor[-1, -1] = -torch.inf
        with pytest.raises(InvalidRequest, match="there: there are numbers among the states that are not finite"):
            item_of(preparer, in_rows(tensor, grid=(1, 2**7, 2**8)))


def test_digests_tell_apart_what_differs(preparer: Preparer) -> None:
    """In a bit, in the type, in shape, grid, kind or times, or because it is no picture; not in how it was sent."""
    tensor = states(dtype="float16")
    other = tensor.clone()
    other.view(torch.int16)[0, 0] ^= 1
    several = [
        in_rows(tensor),
        in_rows(other),
        in_rows(tensor.view(torch.bfloat16)),
        in_rows(tensor, grid=(1, 3, 2)),
        in_rows(tensor.view(3, 2 * WIDTH), grid=(1, 1, 3)),
        in_rows(tensor, kind="video", times=(0.0,)),
        in_rows(tensor, kind="video", times=(1.0,)),
    ]
    digests = [item_of(preparer, one).digest for one in several]
    assert len(set(digests)) == len(several)
    assert item_of(preparer, stated(save({"x": tensor}))).digest == digests[0]


def test_one_request_may_state_the_same_bytes_in_two_ways(preparer: Preparer) -> None:
    media = [in_rows(states()), in_rows(states(), grid=(1, 3, 2)), in_rows(states())]
    with preparer.prepared_now(media) as found:
        assert [one.item.grid for one in found] == [(1, 2, 3), (1, 3, 2), (1, 2, 3)]
        assert found[0].item == found[2].item


def head(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def with_a(value: float, dtype: str) -> torch.Tensor:
    found = states(dtype=dtype)
    found[3, 5] = value
    return found


HUGE = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**40]}
BAD: dict[str, tuple[MediaInput, str]] = {
    **{
        f"{value} in {dtype}": (in_rows(with_a(value, dtype)), "not finite")
        for value in (np.nan, np.inf)
        for dtype in DTYPES
    },
    "nan in safetensors": (stated(save({"x": with_a(np.nan, "bfloat16")})), "not finite"),
    "a byte too few": (stated(raw(states())[:-1], format="raw", dtype="float32", shape=(6, WIDTH)), "575"),
    "a row too many": (stated(raw(states(7)), format="raw", dtype="float32", shape=(6, WIDTH)), "576 bytes"),
    "another type": (stated(raw(states()), format="raw", dtype="float16", shape=(6, WIDTH)), "288 bytes"),
    "no type": (stated(raw(states()), format="raw", shape=(6, WIDTH)), "need dtype and shape"),
    "no shape": (stated(raw(states()), format="raw", dtype="float32"), "need dtype and shape"),
    "a pickle": (stated(b"\x80\x04\x95" + bytes(100)), "not a safetensors file"),
    "half of it": (stated(save({"x": states()})[:300]), "not a safetensors file"),
    "a header without an end": (stated(struct.pack("<Q", 2**60) + b"{}"), "not a safetensors file"),
    "a huge tensor": (stated(head(x=HUGE)), "not a safetensors file"),
    "overlapping tensors": (
        stated(head(**{n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "xy"}) + bytes(4)),
        "not a safetensors file",
    ),
    "two tensors": (stated(save({"x": states(), "y": states()})), "one tensor, and this one has 2"),
    "no tensor": (stated(save({})), "one tensor, and this one has 0"),
    "doubles": (stated(save({"x": states().double()})), "and not F64"),
    "whole numbers": (stated(save({"x": states().int()})), "and not I32"),
    "one axis": (stated(save({"x": states().flatten()})), "[tokens, width]"),
    "three axes": (stated(save({"x": states()[None]})), "[tokens, width]"),
    "nothing in it": (stated(save({"x": torch.zeros(0, WIDTH)})), "[tokens, width]"),
    "not what was said": (stated(save({"x": states()}), dtype="bfloat16"), "the dtype float32, and not bfloat16"),
    "not the shape": (stated(save({"x": states()}), shape=(3, 48)), "the shape (6, 24), and not (3, 48)"),
    "another grid": (in_rows(states(), grid=(1, 2, 2)), "does not come to 6 states"),
    "too many bytes": (in_rows(states(2**16), grid=(1, 2**8, 2**8)), "more than 3145728 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_states(preparer: Preparer, name: str) -> None:
    media, words = BAD[name]
    pids = preparer.pool.pids()
    with pytest.raises(InvalidRequest) as caught, preparer.prepared_now([media]):
        pass
    error = caught.value
    assert words in error.message
    assert (error.status, error.param) == (400, "there")
    assert error.code == ("media_too_large" if name == "too many bytes" else "invalid_media")
    assert not pids or preparer.pool.pids() == pids, "a helper was lost over it"
    assert (preparer.store.bytes, preparer.store.files) == (0, 0)


def test_nothing_of_it_is_told(preparer: Preparer, tmp_path: Path) -> None:
    for media, _ in BAD.values():
        with pytest.raises(InvalidRequest) as caught:
            item_of(preparer, media)
        assert str(preparer.store.directory) not in caught.value.message
