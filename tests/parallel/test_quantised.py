"""Quantised weights on two ranks: codes are cut by blocks, and answers are those of the numbers that they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.toolkit.model.layouts import PLAIN, Code, Codes, Layout, cut_codes, exact
from tests.e2e.reference import Comparison, Reference
from tests.parallel.rank_threads import in_threads
from tests.parallel.test_works import LENGTH, PROMPTS, asked, config
from tests.plugins.quantization.published import WRITERS, published, tiny

Write = Callable[..., tuple[Path, Path]]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Writes a tiny model in a format, and one of the numbers that it means."""

    def write(name: str, architecture: str = "llama", **sizes: int) -> tuple[Path, Path]:
        return published(tmp_path / "coded", tiny(tmp_path / "plain", architecture, **sizes), WRITERS[name])

    return write


def on_two(model: Path, **more: Any) -> Engine:
    return Engine(in_threads(config(model, **more), 2))


@pytest.mark.parametrize("name", ["fp8 small blocks", "awq"])
def test_answers_are_those_of_the_exact_weights(name: str, written: Write, tmp_path: Path) -> None:
    coded, meant = written(name, intermediate_size=192)
    with on_two(coded) as engine:
        answers, comparison = engine.run(asked()), Comparison()
    expected = Reference(meant, tmp_path / "reference").answers(PROMPTS, LENGTH)
    for answer, right in zip(answers, expected, strict=True):
        comparison.add(answer.token_ids, right, answer.rid)
    comparison.finish()


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 2])
def test_in_sections(tensor: int, written: Write, tmp_path: Path) -> None:
    """Codes of other sections' layers are not read."""
    coded, meant = written("awq", intermediate_size=192)
    with Engine(in_threads(config(coded), tensor, pipeline=2)) as engine:
        answers, comparison = engine.run(asked()), Comparison()
    for answer, right in zip(answers, Reference(meant, tmp_path / "reference").answers(PROMPTS, LENGTH), strict=True):
        comparison.add(answer.token_ids, right, answer.rid)
    comparison.finish()


@pytest.mark.parametrize(
    ("name", "architecture", "said"),
    [
        ("fp8 blocks", "llama", "cannot be cut for ranks"),
        (
            "gptq act-order",
            "llama",
            "columns cannot be cut for ranks: columns are not cut where those of a block are not",
        ),
        ("fp8 small blocks", "qwen3_moe", "codes of experts are not cut for ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, architecture: str, said: str, written: Write) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        on_two(written(name, architecture)[0])
    assert said in str(caught.value)


LAYOUTS = (
    Layout(Code.E4M3, (32, 16)), Layout(Code.E4M3, (1, 0)), Layout(Code.INT8, (1, 32)),
    Layout(Code.UINT4, (1, 16), zeros=True), Layout(Code.E4M3, (1024, 1024)), Layout(Code.INT4, (1, 0)), PLAIN,
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_mean_what_the_whole_means(layout: Layout, dim: int) -> None:
    """The last part ends with the matrix, be that within a block or not."""
    draw, rows, cols = torch.Generator().manual_seed(0), 80, 120
    codes = made(layout, rows, cols, draw)
    whole = exact(layout, codes, torch.float32)
    for start, stop in ((0, 64), (64, (rows, cols)[dim])):
        part = exact(layout, cut_codes(layout, codes, dim, start, stop), torch.float32)
        assert torch.equal(part, whole.narrow(dim, start, stop - start))


def made(layout: Layout, rows: int, cols: int, draw: torch.Generator) -> Codes:
    if layout.code is Code.PLAIN:
        return Codes(torch.randn(rows, cols, generator=draw))
    wide = cols // 2 if layout.code.packed else cols
    codes = torch.randint(0, 120, (rows, wide), generator=draw, dtype=torch.uint8)
    if layout.code in (Code.E4M3, Code.INT8):
        codes = codes.view(torch.float8_e4m3fn if layout.code is Code.E4M3 else torch.int8)
    grid = layout.grid(rows, cols)
    zeros = torch.randint(0, 15, grid, generator=draw, dtype=torch.uint8) if layout.zeros else None
    return Codes(codes, torch.rand(grid, generator=draw) + 0.5, zeros)


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 16, 64), (0, 0, 40), (1, 8, 64)])
def test_a_part_of_a_block_is_refused(dim: int, start: int, stop: int) -> None:
    layout = LAYOUTS[0]
    codes = made(layout, 80, 120, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="does not begin and end with a block of"):
        cut_codes(layout, codes, dim, start, stop)
