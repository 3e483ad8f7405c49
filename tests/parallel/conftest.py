"""Checkpoints and answers that all tests of this folder compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.e2e.conftest import checkpoints, reference_dir
from tests.e2e.reference import Answer, Reference
from tests.parallel.prompts import LENGTH, PROMPTS

__all__ = ["checkpoints", "reference_dir"]


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(model: Path, reference_dir: Path) -> list[Answer]:
    return list(Reference(model, reference_dir).answers(PROMPTS, LENGTH))
