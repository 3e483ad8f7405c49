"""Cells of disagg_faults.py, and its storm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.faults.disagg_cells import Cell, of_clients, of_decode, of_loss, of_prefill, of_refusals
from tests.faults.disagg_faults import run

pytestmark = pytest.mark.slow

ALL = [*of_prefill(), *of_decode(), *of_clients(), *of_refusals()]
FEW = (
    "prefill killed, transferring",
    "prefill stopped, waiting",
    "prefill anew, joined",
    "decode anew, transferring",
    "client leaves decode, transferring",
    "client leaves prefill, waiting",
    "client leaves both, computing",
)


def played(tmp_path: Path, cells: Sequence[Cell], *, storm: int = 0, seed: int = 0, **decode: Any) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)

    async def play() -> list[str]:
        return [str(row) async for row in run(model, cells, storm=storm, seed=seed, **decode) if row.wrong]

    wrong = asyncio.run(play())
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_some_cells_and_a_small_storm(tmp_path: Path) -> None:
    played(tmp_path, [cell for cell in ALL if str(cell) in FEW], storm=60)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_is_lost_is_computed(tmp_path: Path) -> None:
    cells = [cell for cell in of_loss() if str(cell) == "prefill anew, transferring"]
    played(tmp_path, cells, on_loss="compute")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_every_cell_and_a_storm(tmp_path: Path, seed: int) -> None:
    played(tmp_path, ALL, storm=200, seed=seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_everything_that_is_lost_is_computed(tmp_path: Path) -> None:
    played(tmp_path, [*of_loss()], on_loss="compute")
