"""Of each file `make test` runs the first mutant, to see that suite and mutants fit; `make test-full` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        if item.path.parent != Path(__file__).parent or item.originalname != "test_caught":  # type: ignore[attr-defined]
            continue
        if item.path in seen:
            item.add_marker(pytest.mark.full)
        seen.add(item.path)
