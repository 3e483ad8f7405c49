"""Checkpoints and answers that all tests of this folder compare with."""

from tests.e2e.conftest import checkpoints, reference_dir

__all__ = ["checkpoints", "reference_dir"]
