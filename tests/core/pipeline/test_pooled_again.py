"""Prompts that are pooled, and retracted when some of them has been pooled already."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.core.interfaces.client import OutputChunk
from pegboard.plugins.row_outputs.messages import NAME
from tests.core.pipeline.company_model import CompanyModel, FakePooler, row_part
from tests.core.pipeline.harness import Harness
from tests.features import FEATURES

PROMPT = [17 * i % 101 for i in range(24)]


@pytest.mark.parametrize("most", [None, 1, 5, 9])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_was_pooled_before_a_retraction_counts_once(most: int | None, chunks: int) -> None:
    """Also where a chunk that is computed again begins amid one that was pooled."""
    pooler = FakePooler(most)
    harness = Harness(model=CompanyModel, pooler=pooler, page_size=4, chunk=8, max_context_len=64)
    assert isinstance(harness.model, CompanyModel)
    harness.model.device_parts = {NAME: row_part(pooler)}
    harness.submit("a", PROMPT, 0, embed=True)
    for _ in range(chunks):
        harness.step()
    assert harness.scheduler.planner.chunked is not None
    harness.scheduler.planner.retract(harness.scheduler.planner.chunked)
    harness.run()
    chunk = OutputChunk("a", "", [], None, 0, 0, 0)
    FEATURES.finish(chunk, harness.outputs["a"][-1])
    assert chunk.vector == pooler.vector(np.array(PROMPT))
