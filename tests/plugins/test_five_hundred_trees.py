"""Five hundred random trees in each attention backend, against float64. The suites of the backends have fewer."""

from __future__ import annotations

import pytest

from pegboard.conformance.attention import AttentionContract
from tests.plugins.attn_flashinfer import test_conformance as flashinfer
from tests.plugins.attn_triton import test_conformance as triton

TREES = 500


class Torch(AttentionContract):
    provider = "torch"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*overflow encountered in exp2")
@pytest.mark.parametrize("suite", [Torch, triton.TestTriton, flashinfer.TestFlashInfer])
def test_five_hundred_trees(
    suite: type[AttentionContract], interpreted_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "tree_examples", (0, TREES))
    suite().test_any_larger_trees()
