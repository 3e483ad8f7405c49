"""Checkpoints are read into given buffers, and whatever does not fit is named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model import weights
from pegboard.toolkit.model.weights import WeightsReader, load_weights

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.full((2, 2), 1 / 3)}


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in TENSORS.items()}


def shard(directory: Path) -> None:
    save_file({"a": TENSORS["a"]}, directory / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, directory / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


@pytest.mark.parametrize("sharded", [False, True])
def test_fills_the_buffers(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        shard(tmp_path)
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
    targets = empty()
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    load_weights(tmp_path, targets)
    for name, tensor in TENSORS.items():
        assert torch.equal(targets[name], tensor)
        assert targets[name].data_ptr() == addresses[name]


def test_reads_some_at_a_time(tmp_path: Path) -> None:
    """In any order, into the type of each buffer; what does not fit is told before anything is read."""
    shard(tmp_path)
    with torch.device("meta"):
        shapes = {name: torch.empty(tensor.shape) for name, tensor in TENSORS.items()}
    reader = WeightsReader(tmp_path, shapes)
    for name in ("c", "a", "b"):
        target = torch.empty(TENSORS[name].shape, dtype=torch.bfloat16)
        reader.read(name, target)
        assert torch.equal(target, TENSORS[name].bfloat16())
    assert reader.nbytes == sum(map(reader.stored, TENSORS)) == 56
    with pytest.raises(ModelError, match=r"two\.safetensors: b \[4\] has no place in this model"):
        WeightsReader(tmp_path, {"a": shapes["a"], "c": shapes["c"]})


def test_reading_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path)
    read: list[int] = []

    @contextlib.contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
        yield read.append
        assert (what, total) == ("reading weights", sum(read))

    monkeypatch.setattr(weights, "progress", progress)
    load_weights(tmp_path, empty())
    assert read == [24, 16, 16]


def test_converts_and_fills_slices(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"], "b": TENSORS["a"] + 10}, tmp_path / "model.safetensors")
    fused = torch.empty(4, 3, dtype=torch.bfloat16)
    load_weights(tmp_path, {"a": fused[:2], "b": fused[2:]})
    assert torch.equal(fused, torch.cat((TENSORS["a"], TENSORS["a"] + 10)).bfloat16())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("buffer", [torch.float32, torch.bfloat16])
def test_dtypes_equal_the_librarys_reading(tmp_path: Path, dtype: torch.dtype, buffer: torch.dtype) -> None:
    stored = {
        "x": (torch.randn(3, 5) * 10).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "y": torch.ones((), dtype=dtype),
    }
    save_file(stored, tmp_path / "model.safetensors")
    targets = {name: torch.zeros(tensor.shape, dtype=buffer) for name, tensor in stored.items()}
    load_weights(tmp_path, targets)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(targets[name], tensor.to(buffer))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.uint8])
def test_codes_that_nothing_explains(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"x": torch.ones(3, 5).to(dtype), "y": torch.ones(5).to(dtype)}, tmp_path / "model.safetensors")
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=rf"safetensors: x \[3, 5\] is stored as {kind}, and nothing says"):
        load_weights(tmp_path, {"x": torch.zeros(3, 5), "y": torch.zeros(5)})
    load_weights(tmp_path, {"y": torch.zeros(5)}, ignore=lambda name: name == "x")


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 20])
def test_tensors_of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Converted piece by piece; the last may be shorter, and what the pieces before left in memory does not show."""
    monkeypatch.setattr(weights, "_PIECE", 8)
    stored = {"x": torch.arange(float(count)) - 3, "y": torch.arange(2.0 * count).view(count, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    targets = {name: torch.full(tensor.shape, 99, dtype=torch.bfloat16) for name, tensor in stored.items()}
    load_weights(tmp_path, targets)
    for name, tensor in stored.items():
        assert torch.equal(targets[name], tensor.bfloat16())


def test_strided_buffers(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    wide = torch.zeros(2, 6)
    load_weights(tmp_path, {"a": wide[:, ::2]})
    assert torch.equal(wide[:, ::2], TENSORS["a"])
    assert not wide[:, 1::2].any()


def test_all_problems_are_named(tmp_path: Path) -> None:
    save_file({**TENSORS, "extra": torch.ones(7)}, tmp_path / "model.safetensors")
    targets = {**empty(), "b": torch.empty(5)}
    with pytest.raises(ModelError) as raised:
        load_weights(tmp_path, targets)
    assert "b has shape [4], the config asks for [5]" in str(raised.value)
    assert "extra [7] has no place in this model" in str(raised.value)
    load_weights(tmp_path, empty(), ignore=lambda name: name == "extra")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks b \[4\]; .* lacks c \[2, 2\]"):
        load_weights(tmp_path, empty())


def test_long_lists_of_problems_are_cut(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    targets = {"a": torch.empty(2, 3), **{f"x{i}": torch.empty(1) for i in range(50)}}
    with pytest.raises(ModelError, match=r"and 45 more problems"):
        load_weights(tmp_path, targets)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    shard(tmp_path)
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"two\.safetensors lacks c, which the index promises"):
        load_weights(tmp_path, empty())
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors is missing, though .* names it"):
        load_weights(tmp_path, empty())


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd"])
def test_an_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    with pytest.raises(ModelError, match="is not a file name"):
        load_weights(tmp_path, empty())


def test_pickles_are_never_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        load_weights(tmp_path, empty())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match="pickled weights only"):
        load_weights(tmp_path, empty())


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_weights(tmp_path, empty())
