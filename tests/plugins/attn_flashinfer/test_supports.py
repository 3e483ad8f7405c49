"""What the backend objects to, without importing flashinfer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_flashinfer.backend import FlashInferAttention
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from pegboard.plugins.attn_flashinfer.shell import VERSION

CPU = torch.device("cpu")


def context(layer: LayerSpec | None = None, dtype: torch.dtype = torch.float16) -> AttentionContext:
    return AttentionContext((layer or make_layer(8, 2, 128),), 16, dtype, CPU, 4, 64)


def objection(ctx: AttentionContext, options: FlashInferOptions | None = None) -> str:
    return str(FlashInferAttention.supports(options or FlashInferOptions(), ctx))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for packages. Importing the flashinfer that is put there fails."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def put(place: Path, version: str, requires: str = "") -> None:
    (place / "flashinfer").mkdir()
    (place / "flashinfer" / "__init__.py").write_text("raise AssertionError('imported')")
    info = place / f"flashinfer_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n{requires}\n")


def test_not_installed() -> None:
    if "flashinfer" in sys.modules:
        pytest.skip("flashinfer is installed")
    assert "pip install 'pegboard[flashinfer]'" in objection(context())


def test_another_version(install: Path) -> None:
    put(install, "0.6.0")
    assert f"flashinfer 0.6.0 is installed, and {VERSION} is needed" in objection(context())


def test_without_what_it_requires(install: Path) -> None:
    """Importing it would fail."""
    put(install, VERSION, "Requires-Dist: torch\nRequires-Dist: not-there (>=1)\nRequires-Dist: other; extra == 'x'")
    assert "cannot be imported without not-there:" in objection(context())


def test_no_gpu(install: Path) -> None:
    put(install, VERSION)
    assert "run on NVIDIA GPUs, not on cpu" in objection(context())
    assert "flashinfer" not in sys.modules


def test_too_old_a_gpu(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(install, VERSION)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in objection(replace(context(), device=torch.device("cuda")))


def test_no_compiler(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(install, VERSION)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CUDA_HOME", str(install))
    monkeypatch.setenv("PATH", str(install))
    assert "no nvcc" in objection(replace(context(), device=torch.device("cuda")))
    (install / "bin").mkdir()
    (install / "bin" / "nvcc").touch()
    assert objection(replace(context(), device=torch.device("cuda"))) == "None"


@pytest.mark.parametrize(
    ("ctx", "reason"),
    [
        (context(dtype=torch.float32), "float16 and bfloat16, not float32"),
        (context(make_layer(8, 2, 80)), "layer 0: its kernels take heads of 64, 128, 256, not of 80"),
        (context(make_layer(8, 2, 128, 96)), "not of 96"),
        (replace(context(), kv_dtype=torch.bfloat16), "do not read KV of bfloat16"),
    ],
)
def test_what_does_not_fit(ctx: AttentionContext, reason: str) -> None:
    assert reason in objection(ctx)


def test_fa3_reads_no_eight_bit() -> None:
    ctx = replace(context(), kv_dtype=torch.float8_e4m3fn)
    assert "set it to fa2" in objection(ctx, FlashInferOptions(backend="fa3"))
