"""Cores: those that the process may run on, and no more than its container's quota pays for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pegboard.toolkit.system.cores import usable_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
    ],
)
def test_a_quota_counts(text: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    file = tmp_path / "cpu.max"
    file.write_text(text, "ascii")
    assert usable_cores(file) == cores
    assert usable_cores(tmp_path / "none") == 8
