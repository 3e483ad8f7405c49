"""What adapters cost, measured small: that figures come of all arms, and limits are those that the module states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.adapters import Bytes, Found
from pegboard.conformance.checkpoints import tiny_checkpoint

FOUND = Found(8, {"without": 10.0, "none": 10.1, "one": 11.0, "different": 19.0}, Bytes(96, 37, 78), 12.0, 17.9, 8, 1)


def test_limits() -> None:
    assert FOUND.nbytes.allowed == pytest.approx(133 / 211)
    assert all(fine for _, _, fine in FOUND.checks.values())
    for arm, slow in (("none", 10.3), ("one", 11.9), ("different", 20.0)):
        checks = replace(FOUND, steps={**FOUND.steps, arm: slow}).checks
        assert [name for name, (_, _, fine) in checks.items() if not fine] == [arm]
    assert not replace(FOUND, loading_p99=18.1).checks["loading"][2]


def test_a_small_run(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", hidden_size=64, num_attention_heads=2, head_dim=32)
    words = ["--model", str(model), "--streams", "3", "--runs", "1", "--input", "9", "--output", "8", "--loads", "2"]
    args = adapters.parser().parse_args([*words, "--rank", "4", "--loaded-bytes", "100000"])
    found = adapters.measure(args)
    assert set(found.steps) == {"without", "none", "one", "different"}
    assert all(step > 0 for step in found.steps.values())
    numbers = sum(sum(sizes) for sizes in adapters.projections(model).values())
    assert found.nbytes.adapters == 3 * 4 * numbers * 2
    assert 50_000 < found.loaded_bytes <= 100_000
    assert found.nbytes.weights > 0
    assert found.quiet_p99 > 0
    assert found.loading_p99 > 0
    assert len(list(adapters.lines(found))) == 3 + len(found.checks)
