"""When the Triton sampler objects, and what it says then; and what its options must be."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.plugins.sampler_triton.options import TritonSamplerOptions
from pegboard.plugins.sampler_triton.sampler import TritonSampler
from pegboard.toolkit.kernels import allowed
from tests.plugins.sampler_triton.cases import DEVICE

OPTIONS = TritonSamplerOptions()


def test_it_runs_here() -> None:
    """Or the conformance tests would all be skipped without a word."""
    assert TritonSampler.supports(OPTIONS, SamplerContext(100, DEVICE)) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_gpu_and_no_interpreter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ctx = SamplerContext(100, torch.device(device))
    reason = TritonSampler.supports(OPTIONS, ctx)
    assert reason == "no CUDA device, and no interpreter: TRITON_INTERPRET is not set"
    with allowed(device):
        assert TritonSampler.supports(OPTIONS, ctx) is None


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = TritonSampler.supports(OPTIONS, SamplerContext(100, torch.device("cuda:7")))
    assert reason == "its kernels need compute capability 8.0 (Ampere) or later"


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("pegboard.toolkit.kernels.find_spec", lambda name: None if name == "triton" else find(name))
    reason = TritonSampler.supports(OPTIONS, SamplerContext(100, DEVICE))
    assert reason is not None
    assert "pip install 'pegboard[triton]'" in reason


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block": 48}, "power of two"),
        ({"block": 8}, "from 16 to 16384"),
        ({"block": 2**15}, "from 16 to 16384"),
        ({"rows": 3}, "power of two"),
        ({"rows": 0}, "power of two"),
    ],
    ids=str,
)
def test_options_that_make_no_tile(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TritonSamplerOptions.model_validate(options)
