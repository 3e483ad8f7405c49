"""When the Triton backend objects, and what it says then."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.toolkit.model.eight_bit import EIGHT_BIT


def context(layer: LayerSpec | None = None, dtype: torch.dtype = torch.float32) -> AttentionContext:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return AttentionContext((layer or make_layer(),), 1, dtype, device, 8, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_runs_here(dtype: torch.dtype) -> None:
    """Or the conformance tests would all be skipped without a word."""
    assert TritonAttention.supports(None, context(dtype=dtype)) is None  # type: ignore[arg-type]


def test_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ctx = AttentionContext((make_layer(),), 1, torch.float32, torch.device("cpu"), 8, 256)
    reason = TritonAttention.supports(None, ctx)  # type: ignore[arg-type]
    assert reason == "no CUDA device, and no interpreter: TRITON_INTERPRET is not set"


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "pegboard.plugins.attn_triton.backend.find_spec", lambda name: None if name == "triton" else find(name)
    )
    reason = TritonAttention.supports(None, context())  # type: ignore[arg-type]
    assert reason is not None
    assert "pip install 'pegboard[triton]'" in reason


def test_interpreter_turned_on_too_late() -> None:
    """Triton was imported as a compiler, and stays one."""
    code = """
import os, torch, triton
os.environ["TRITON_INTERPRET"] = "1"
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.plugins.attn_triton.backend import TritonAttention
print(TritonAttention.supports(None, AttentionContext((), 1, torch.float32, torch.device("cpu"), 8, 256)))
"""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "triton was imported before TRITON_INTERPRET=1 was set" in run.stdout


@pytest.mark.parametrize(
    ("ctx", "reason"),
    [
        (context(dtype=torch.float64), "not float64"),
        (context(make_layer(4, 2, 1024)), "heads of more than 512"),
        (context(make_layer(4, 2, 16, 1024)), "heads of more than 512"),
        (context(make_layer(256, 1)), "more than 128 query heads"),
        (context(make_layer(16, 1, 1088, 1024, latent=True)), "heads of more than 512"),
        (replace(context(make_layer(16, 1, 24, 16, latent=True)), kv_dtype=EIGHT_BIT[0]), "no latents (MLA) in 8 bits"),
    ],
)
def test_what_does_not_fit(ctx: AttentionContext, reason: str) -> None:
    assert reason in str(TritonAttention.supports(None, ctx))  # type: ignore[arg-type]


ON_A_GPU = [(dtype, kept) for dtype in (torch.float16, torch.bfloat16, torch.float32) for kept in (None, *EIGHT_BIT)]


@pytest.mark.parametrize(("dtype", "kept"), ON_A_GPU, ids=str)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
def test_which_gpus(
    capability: tuple[int, int], dtype: torch.dtype, kept: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 8.0 on, which has bfloat16. 8-bit KV is read as bytes: no GPU needs 8-bit floats for it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    ctx = AttentionContext((make_layer(32, 8, 128),), 1, dtype, torch.device("cuda:7"), 8, 256, kv_dtype=kept)
    old = "its kernels need compute capability 8.0 (Ampere) or later"
    assert TritonAttention.supports(TritonAttentionOptions(), ctx) == (old if capability < (8, 0) else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter only")
def test_no_bfloat16_in_the_interpreter() -> None:
    reason = TritonAttention.supports(None, context(dtype=torch.bfloat16))  # type: ignore[arg-type]
    assert reason is not None
    assert "model.dtype" in reason
