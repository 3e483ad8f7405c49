"""Random weights in place of a checkpoint's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.model_references import context
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.model.dummy import SCALE, draw_weights


def test_matrices_are_drawn_and_norms_are_one() -> None:
    layer = torch.nn.Linear(300, 400)
    network = torch.nn.Sequential(layer, torch.nn.LayerNorm(400))
    draw_weights(network)
    matrix = layer.weight.detach()
    assert abs(float(matrix.mean())) < 5 * SCALE / matrix.numel() ** 0.5
    assert float(matrix.std()) == pytest.approx(SCALE, rel=0.02)
    assert all(bool((weight == 1).all()) for weight in network.parameters() if weight.dim() == 1)
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
    assert float(network.embedding.weight.float().std()) == pytest.approx(SCALE, rel=0.1)
