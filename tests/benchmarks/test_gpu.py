"""The benchmark of a GPU, without one: every section runs over stand-ins, and says so where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.sections import SECTIONS


def test_no_section_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it is a rehearsal; the reason says what to do."""
    if gpu.run_here("environment", dry=False).get("rows"):
        pytest.skip("there is a GPU")
    assert "--dry-run needs none" in gpu.run_here("decode", dry=False)["skipped"]


def test_together_they_take_eight_minutes_at_most() -> None:
    assert sum(limit for _, limit, _ in SECTIONS.values()) <= 8 * 60


@pytest.mark.parametrize("section", ["environment", "waiting", "attention", "sampling"])
def test_a_section_runs(section: str) -> None:
    rows = gpu.run_here(section, dry=True)["rows"]
    assert rows
    assert all(len(row) > 1 for row in rows)


@pytest.mark.full
def test_all_of_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--dry-run", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["sections"]
    assert found.keys() == SECTIONS.keys()
    assert all(one["rows"] for one in found.values())
    alike = found["correctness"]["rows"]
    assert all(row["steps_alike"] == row["steps"] for row in alike)
    of_a_token = {row["kv"]: row["bytes"] for row in found["eight_bit"]["rows"]}
    assert of_a_token["float8_e4m3fn"] * 4 == of_a_token["float32"]
    assert "goal: 0.85" in capsys.readouterr().out


def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    section, _, told = SECTIONS["waiting"]
    monkeypatch.setitem(SECTIONS, "waiting", (section, 0.1, told))
    assert gpu.run_apart("waiting", dry=True)["failed"] == "it took more than 0.1 s"
