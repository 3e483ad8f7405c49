"""A few rounds of tiers_kill.py: kills amid writes to a storage, and starts over the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.faults.tiers import answered
from tests.faults.tiers_kill import run


@pytest.mark.full
@pytest.mark.slow
def test_two_kills(tmp_path: Path) -> None:
    with answered(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2), talks=6) as world:
        *_, summary = run(world, tmp_path / "kv", rounds=2)
    assert len(summary.hits) == 2
    assert summary.requests > 10
