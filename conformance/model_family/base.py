"""What all tests of model families start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard.conformance.checkpoints import ARCHITECTURES
from pegboard.conformance.rig.model_references import WINDOW, context, model_checkpoint
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.model_family import ModelFamily, Network

TOLERANCE = 1e-4
"""Largest difference of a position's logits over their largest magnitude, in float32.

A matrix product is off by up to 2.5 * 2^-24 of the product of the norms, some 5e-7 of the largest results. A layer has
five in a row, and roundings add up as roots of sums of squares: 1e-6 for one layer, 6e-6 for 30. Norms, softmax and the
choice of experts enlarge that by three to five. Sums in the worst order make 5e-6 of the suite's checkpoints. TF32
rounds 2^13 times as much, which is about 1e-2.
"""


class ModelSuite(ContractSuite):
    """Builds the family under test for tiny checkpoints, and runs its networks over plain paged memory."""

    contract = "model_family"

    architectures: ClassVar[tuple[str, ...]] = ARCHITECTURES

    def make_checkpoint(self, directory: Path, architecture: str, **overrides: Any) -> Path:
        """Return a tiny float32 checkpoint in a folder below `directory`; `overrides` are fields of its decoder's
        config.
        """
        return model_checkpoint(directory, architecture, **overrides)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "architecture" in metafunc.fixturenames:
            metafunc.parametrize("architecture", self.architectures)

    @pytest.fixture
    def checkpoint(self, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a checkpoint that the family supports. Skips the test, with the family's reason, where there is
        none.
        """
        return self._checkpoint(architecture, tmp_path_factory)

    def _checkpoint(self, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        overrides = {"sliding_window": WINDOW} if architecture in {"mistral", "gemma2"} else {}
        return self.make_checkpoint(tmp_path_factory.getbasetemp() / "model_family", architecture, **overrides)

    def _load(self, directory: Path, **changes: Any) -> tuple[ModelFamily, Network]:
        family: ModelFamily = self.build(context(directory, **changes))
        return family, family.load()

    def _run(self, directory: Path) -> PagedRun:
        family, network = self._load(directory)
        return PagedRun(network, family.spec)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail where logits [len, vocab] differ by more than `TOLERANCE`."""
    __tracebackhide__ = True
    assert found.shape == expected.shape
    scale = expected.abs().amax(-1).clamp_min(1e-6)
    error = ((found - expected).abs().amax(-1) / scale).max()
    assert float(error) <= TOLERANCE, f"logits are off by {float(error):.3g} relative"
