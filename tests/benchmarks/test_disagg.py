"""The benchmark of moving KV between servers runs, and compares all rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import disagg


@pytest.mark.full
def test_all_of_it_runs(tmp_path: Path) -> None:
    disagg.main(["--quick", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["medians"]
    assert set(found) == {"socket", "tcp 1", "tcp 16", "tcp 64", "tcp heads"}
    assert all(one["ms"] > 0 and one["gb_per_s"] > 0 for one in found.values())


def test_an_engine_that_is_not_there_is_refused() -> None:
    with pytest.raises(SystemExit, match="there is no kv_transfer 'carrier_pigeon'"):
        disagg.build("carrier_pigeon", ())
