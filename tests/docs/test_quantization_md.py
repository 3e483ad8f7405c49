"""The page on quantised weights: its format of one's own reads a checkpoint, and its messages and names are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.fp8 import METHODS
from pegboard.plugins.quantization.formats.modelopt import ALGORITHMS
from pegboard.toolkit.model.coded import slots_of
from tests.docs.test_docs import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quantization.md").read_text("utf-8")


def test_a_format_of_your_own(tmp_path: Path) -> None:
    [code] = blocks(PAGE, "python")
    written: dict[str, Any] = {}
    exec(code, written)
    codes, scales = torch.randint(-128, 128, (3, 8), dtype=torch.int8), torch.rand(3) + 0.5
    save_file({"x.q_proj.codes": codes, "x.q_proj.scales": scales}, tmp_path / "model.safetensors")
    ctx = FormatContext({"quant_method": "bytes8"}, slots_of(tmp_path))
    assert written["Bytes8"].supports(NoOptions(), ctx) is None
    [(name, matrix)] = written["Bytes8"](NoOptions(), ctx).matrices().items()
    found = torch.empty(3, 8)
    matrix.fill(found)
    assert (name, matrix.shape) == ("x.q_proj.weight", (3, 8))
    assert torch.equal(found, codes.float() * scales[:, None])
    assert written["Bytes8"].supports(NoOptions(), FormatContext({"quant_method": "awq"}, {})) is not None


@pytest.mark.parametrize("name", ["compressed-tensors", "modelopt", "awq", "gptq", "mxfp4", *METHODS, *ALGORITHMS])
def test_what_loads_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_products_are_in_the_table() -> None:
    names = {one.name for one in Registry.discover().providers("linear") if one.origin.builtin}
    assert names == set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("| provider |")[2].partition("\n\n")[0], re.M))


def test_messages_are_in_the_code() -> None:
    """Without the names in them."""
    folders = ("plugins/quantization", "toolkit/model")
    code = "".join(file.read_text("utf-8") for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    rows = PAGE.partition("| message |")[2].partition("\n\n")[0].splitlines()[2:]
    told = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(told) > 8
    for message in told:
        for part in re.split(r"\bX\b|\bY\b|'\w+'|\bnan\b|\bfloat8_e4m3fn\b|\b96\b", message):
            assert part.strip(" (),;") in code, message
