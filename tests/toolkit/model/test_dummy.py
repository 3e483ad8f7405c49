"""Random weights in place of a checkpoint's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.model_references import context
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.model.dummy import SCALE, draw_weights


def test_matrices_are_drawn_norms_are_one_and_biases_zero() -> None:
    layer = torch.nn.Linear(300, 400)
    network = torch.nn.Sequential(layer, torch.nn.LayerNorm(400))
    draw_weights(network)
    matrix = layer.weight.detach()
    assert abs(float(matrix.mean())) < 5 * SCALE / matrix.numel() ** 0.5
    assert float(matrix.std()) == pytest.approx(SCALE, rel=0.02)
    found = {name: set(one.tolist()) for name, one in network.named_parameters() if one.dim() == 1}
    assert found == {"0.bias": {0.0}, "1.weight": {1.0}, "1.bias": {0.0}}
    first = matrix.clone()
    draw_weights(network)
    assert torch.equal(first, matrix), "one seed has the same weights"
    draw_weights(network, seed=1)
    assert not torch.equal(first, matrix)


def test_the_dense_family_needs_no_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And of files that are there it reads none."""
    directory = tiny_checkpoint(tmp_path, "llama")
    (directory / "model.safetensors").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        network = DenseFamily(DenseOptions(load_format="dummy"), context(directory)).load()
    assert "answers have no meaning" in caplog.text
    assert isinstance(network, DenseNetwork)
    assert network.embedding is not None
    assert float(network.embedding.weight.float().std()) == pytest.approx(SCALE, rel=0.1)


def test_biases_of_the_dense_family_are_zero(tmp_path: Path) -> None:
    network = DenseFamily(DenseOptions(load_format="dummy"), context(tiny_checkpoint(tmp_path, "qwen2"))).load()
    assert isinstance(network, DenseNetwork)
    flat = {name: one for name, one in network.named_parameters() if one.dim() == 1}
    assert sum(name.endswith(".qkv.bias") for name in flat) == len(network.layers)
    assert all(bool((one == (0 if name.endswith("bias") else 1)).all()) for name, one in flat.items())


def test_dummy_weights_have_no_scales_of_kv(tmp_path: Path) -> None:
    """An engine with 8-bit KV asks for them, where there may be no safetensors."""
    directory = tiny_checkpoint(tmp_path, "llama")
    (directory / "model.safetensors").unlink()
    config = {
        "model": {
            "path": str(directory), "use": "dense", "load_format": "dummy", "dtype": "float32", "device": "cpu",
            "source": {"use": "hf", "needs_weights": False},
        },
        "memory": {"max_total_tokens": 256, "kv_dtype": "fp8_e4m3"},
        "attention": {"use": "torch"},
        "runner": {"use": "layered"},
    }  # fmt: skip
    with Engine.from_config(config) as engine:
        (answer,) = engine.run([GenerateRequest(prompt=[5, 6, 7], sampling=SamplingParams(max_new_tokens=3))])
    assert len(answer.token_ids) <= 3
