"""Prompts that are pooled, and retracted when some of them has been pooled already."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.pipeline.company_model import CompanyModel, FakePooler, RowStage, asking, said_by
from tests.core.pipeline.harness import Harness

PROMPT = [17 * i % 101 for i in range(24)]


@pytest.mark.parametrize("most", [None, 1, 5, 9])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_was_pooled_before_a_retraction_counts_once(most: int | None, chunks: int) -> None:
    """Also where a chunk that is computed again begins amid one that was pooled."""
    pooler = FakePooler(most)
    rows = RowStage(pooler)
    harness = Harness(model=CompanyModel, joining=[rows.stage], page_size=4, chunk=8, max_context_len=64)
    assert isinstance(harness.model, CompanyModel)
    harness.model.device_parts = {rows.part.name: rows.part}
    harness.submit("a", PROMPT, 0, features=asking(embed=True))
    for _ in range(chunks):
        harness.step()
    assert harness.scheduler.chunked is not None
    harness.scheduler.planner.retract(harness.scheduler.chunked)
    harness.run()
    found = np.frombuffer(said_by(harness.outputs["a"][-1]).vector, "<f4").tolist()
    assert found == pooler.vector(np.array(PROMPT))
