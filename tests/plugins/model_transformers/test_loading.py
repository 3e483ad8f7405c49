"""Which tensors of a checkpoint become weights of transformers' modules, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.family import TransformersFamily
from tests.plugins.model_transformers.tiny import SERVED, context, save


def with_tensors(directory: Path, **changed: torch.Tensor) -> Path:
    """Return a checkpoint, some of whose tensors have been replaced or added."""
    file = directory / "model.safetensors"
    save_file(load_file(file) | changed, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_without_a_config_for_them_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Not taken for weights, though transformers would convert them to the model's type."""
    name = "model.layers.1.mlp.up_proj.weight"
    save(tmp_path, *SERVED["qwen3"])
    codes = (load_file(tmp_path / "model.safetensors")[name] * 100).to(dtype)
    with_tensors(tmp_path, **{name: codes, f"{name}_scale": torch.tensor(0.01)})
    short = str(dtype).removeprefix("torch.")
    message = rf"model\.safetensors: {name} {short} \[48, 32\] .*nothing says what these numbers mean"
    with pytest.raises(ModelError, match=message):
        TransformersFamily(NoOptions(), context(tmp_path)).load()


def test_masks_of_bytes_are_no_codes(tmp_path: Path) -> None:
    """Files of Pythia have them beside the weights."""
    save(tmp_path, *SERVED["gpt_neox"])
    mask = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()
    with_tensors(tmp_path, **{f"gpt_neox.layers.{i}.attention.bias": mask.clone() for i in range(3)})
    assert TransformersFamily(NoOptions(), context(tmp_path)).load() is not None
