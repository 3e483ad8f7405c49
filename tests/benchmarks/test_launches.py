"""A decode step launches few things, greedy or not; and the count sees what is too much."""

from __future__ import annotations

import pytest
import torch

from benchmarks.launches import MODELS, Counter, Rig, measured, problems
from pegboard.core.interfaces.sampling import SamplingParams

pytest.importorskip("triton")


def test_few_launches() -> None:
    found = measured(batch=8)
    assert {one.model for one in found} == set(MODELS)
    assert problems(found) == []
    for one in found:
        assert one.layer.count("mm") == (3 if "route_kernel" in one.layer else 4)
        assert {"decode_kernel", "reduce_kernel", "qk_norm_rope_store_kernel"} <= set(one.layer)
        assert "sample_kernel" in one.outside


def test_it_counts_what_launches() -> None:
    """Views and memory are free, and so is what the host computes."""
    with Counter() as counter, torch.inference_mode():
        one = torch.empty(4, 6, device="meta")
        rows = one.view(24)[:12].chunk(2)[0].unsqueeze(0).transpose(0, 1)
        torch.ones(3) + 1
        assert counter.launched == []
        torch.nn.functional.linear(one, torch.empty(5, 6, device="meta"))
        assert counter.launched == ["mm"]
        rows.contiguous().float() + 1.0
        assert len(counter.launched) > 1
        assert counter.launched[-1] == "add"


def test_too_many_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the additions and norms of torch a layer takes more."""
    monkeypatch.setattr("pegboard.toolkit.kernels.operations.TYPES", frozenset({torch.float32}))
    rigs = (Rig("Llama 3 8B", layers, 2) for layers in (1, 2))
    one, two = (rig.step(SamplingParams(temperature=0.0)) for rig in rigs)
    assert len(two) - len(one) > 20
