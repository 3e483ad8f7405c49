"""The meaning of codes; the suite of `weight_format` compares it with numbers that are computed apart."""

from __future__ import annotations

import pytest
import torch

from pegboard.plugins.quantization.suite.linear import COLS, LAYOUTS, drawn
from pegboard.toolkit.model.layouts import Code, Layout, exact, pack, rows_at_once, unpack


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("at_once", [1, 40 * COLS])
def test_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, layout: Layout, at_once: int) -> None:
    codes = drawn(layout, 300, 0)
    whole = exact(layout, codes, torch.float32)
    monkeypatch.setattr("pegboard.toolkit.model.layouts._AT_ONCE", at_once)
    assert torch.equal(exact(layout, codes, torch.float32), whole)


def test_few_pieces_on_a_gpu() -> None:
    """Each costs ten launches in a decode step of NF4: a matrix of an MLP of Llama 3 8B has 4 pieces, on a CPU 56."""
    layout = Layout(Code.NF4, (1, 64))
    pieces = {kind: -(-14336 // rows_at_once(layout, 14336, 4096, torch.device(kind))) for kind in ("cpu", "cuda")}
    assert pieces == {"cpu": 56, "cuda": 4}
    assert rows_at_once(Layout(Code.E4M3, (128, 128)), 4096, 2**14, torch.device("cuda")) % 128 == 0


def test_halves_of_bytes() -> None:
    numbers = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert pack(numbers)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack(pack(numbers)), numbers)


def test_names() -> None:
    told = [str(Layout(Code.E4M3, (128, 128))), str(Layout(Code.UINT4, (1, 64), True, True)), str(Layout(Code.INT8))]
    assert told == ["e4m3 128x128", "uint4 1x64 zeros ordered", "int8 1xrow"]
