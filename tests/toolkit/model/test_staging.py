"""Tensors are read ahead into a few buffers and land in their places, whatever pieces they are cut into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model import staging
from pegboard.toolkit.model.staging import Stored, stage
from pegboard.toolkit.model.weights import load_weights, read_header

HERE = torch.device("cpu")


def checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Write two files, and return what they hold."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(37, 11, generator=generator),
        "b": torch.randn(64, generator=generator).bfloat16(),
        "c": torch.randint(-9, 9, (3, 5, 7), generator=generator),
        "empty": torch.empty(0, 4),
        "one": torch.ones(()),
        "d": torch.randn(100, 3, generator=generator).half(),
    }
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:3]}, directory / "one.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, directory / "two.safetensors")
    return tensors


def stored(directory: Path) -> dict[str, Stored]:
    return {
        name: Stored(file, tensor.dtype, tensor.shape, tensor.start)
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in read_header(file).items()
    }


@pytest.mark.parametrize("piece", [8, 64, 1000, 2**20])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gaps", [False, True])
def test_every_number_lands_in_its_place(tmp_path: Path, piece: int, dtype: torch.dtype | None, gaps: bool) -> None:
    tensors = checkpoint(tmp_path)
    targets = {}
    for name, tensor in tensors.items():
        target = torch.full((*tensor.shape, 2), 99, dtype=dtype or tensor.dtype)
        targets[name] = target[..., 0] if gaps else target[..., 0].contiguous()
    places = stored(tmp_path)
    counts = list(stage([(places[name], targets[name]) for name in tensors], HERE, piece=piece))
    assert max(counts) <= piece
    assert sum(counts) == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor.to(targets[name].dtype)), name


@pytest.mark.parametrize("piece", [8, 4096])
def test_a_file_that_ends_early_is_named(tmp_path: Path, piece: int) -> None:
    tensors = checkpoint(tmp_path)
    places, file = stored(tmp_path), tmp_path / "two.safetensors"
    with file.open("r+b") as shortened:
        shortened.truncate(file.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"two\.safetensors' ended early"):
        list(stage([(places[name], torch.empty_like(tensor)) for name, tensor in tensors.items()], HERE, piece=piece))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_reach_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"w{number}": torch.randn(3000, 4001, generator=generator) for number in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {name: torch.empty(3000, 8002, dtype=dtype, device="cuda")[:, ::2] for name in tensors}
    targets["w0"] = torch.empty(3000, 4001, dtype=dtype, device="cuda")
    load_weights(tmp_path, targets)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].cpu(), tensor.to(dtype)), name


def test_page_locked_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, once all is there; a torch that has no way to is left as it is."""
    given: list[None] = []
    monkeypatch.setattr(staging, "_staged", lambda wanted, device, piece: iter([1, 2]))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given.append(None), raising=False)
    reading = stage([], torch.device("cuda"))
    assert (next(reading), given) == (1, [])
    assert (list(reading), given) == ([2], [None])
    assert (list(stage([], HERE)), given) == ([1, 2], [None])
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    assert list(stage([], torch.device("cuda"))) == [1, 2]
