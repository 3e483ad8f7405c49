"""Checkpoints with other numbers than tiny ones have, for tests of weights that are replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pegboard.conformance.checkpoints import built_once


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    return {name: one for file in sorted(directory.glob("*.safetensors")) for name, one in load_file(file).items()}


def other_weights(directory: Path, *only: str) -> Path:
    """Return a copy of a checkpoint, beside it, in which all tensors are other ones, or those of these names alone."""
    target = directory.with_name(f"{directory.name}-other{'-'.join(('', *only))}")

    def build(scratch: Path) -> None:
        shutil.copytree(directory, scratch, dirs_exist_ok=True)
        for file in scratch.glob("*.safetensors"):
            found = load_file(file)
            changed = {name: another(one) if not only or name in only else one for name, one in found.items()}
            save_file(changed, file, {"format": "pt"})

    return built_once(target, build)


def another(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and about the same size, with another number at each place."""
    return (tensor.reshape(-1).roll(1) * 0.9 + 0.01).reshape(tensor.shape).contiguous()
