"""The benchmark of a prefill and a decode server runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pairs


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_all_of_it_runs(tmp_path: Path) -> None:
    pairs.main(["--quick", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0.2 < found["cached"] < 0.3
    assert all(seconds > 0 for row in found["idle"].values() for seconds in row)
    assert found["streams"][0]["pair"]["gap_p99"] > 0
