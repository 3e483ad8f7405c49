"""What leaves the worker is on the host."""

from __future__ import annotations

import pytest
import torch

from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.pipeline.worker import on_host


def test_logprobs_on_the_host_stay_as_they_are() -> None:
    found = LogprobOutput(torch.zeros(2))
    assert on_host(found) is found
    assert on_host(None) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logprobs_leave_the_device_together() -> None:
    device = torch.device("cuda")
    ids = torch.tensor([[4, 5], [6, 7]], device=device)
    found = on_host(LogprobOutput(torch.ones(2, device=device), ids.float(), ids, {1: torch.zeros(3, device=device)}))
    assert found is not None
    assert {
        tensor.device.type
        for tensor in (found.token_logprobs, found.top_values, found.top_ids, found.chosen[1])
        if tensor is not None
    } == {"cpu"}
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[4, 5], [6, 7]]
