"""What the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny checkpoints are made, once per run."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def reference_dir(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reference's answers are kept; from one run to the next, where pytest has a cache."""
    cache = getattr(pytestconfig, "cache", None)
    return Path(cache.mkdir("reference-answers")) if cache is not None else tmp_path_factory.mktemp("reference")
