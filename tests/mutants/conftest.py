"""Of each test with mutants `make test` runs the first, to see that they fit the suite; `make test-full` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        name = getattr(item, "originalname", None) or ""
        if item.path.parent != Path(__file__).parent or not name.startswith("test_caught"):
            continue
        if (item.path, name) in seen:
            item.add_marker(pytest.mark.full)
        seen.add((item.path, name))
