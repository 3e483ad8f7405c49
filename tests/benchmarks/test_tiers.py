"""The benchmark of tiers runs, and finds each kind of KV where it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers
from pegboard.conformance.checkpoints import tiny_checkpoint


@pytest.mark.full
def test_all_of_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path, "llama", vocab_size=40_000)
    tiers.main(["--quick", "--model", str(model), "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["host"]) == {"recompute", "device", "host", "miss"}
    assert set(found["files"]) == {"recompute", "files", "files cold", "miss with files"}
    assert all(seconds > 0 for part in ("host", "files", "beside") for row in found[part].values() for seconds in row)
    assert found["new"]["ratio"]["median"] > 0
    told = capsys.readouterr().out
    assert "redis" in found or "redis-server is not installed" in told
