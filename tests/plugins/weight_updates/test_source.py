"""Files with new weights: what is seen of them before anything is written."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.model_references import read_config
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.weights import TensorSpec, WeightStore
from pegboard.plugins.weight_updates.source import FileSource, MemorySource, check, of_directory

SHAPE = (2, 3)


class Store(WeightStore):
    """Expects tensors a and b, which come together, and c."""

    def expected(self) -> Mapping[str, TensorSpec]:
        groups = {"a": "both", "b": "both", "c": ""}
        return {name: TensorSpec(SHAPE, torch.float32, group) for name, group in groups.items()}

    def ignores(self, name: str) -> bool:
        return name == "ignored"

    def begin(self, names: Collection[str]) -> None:
        raise AssertionError("nothing is to be written")

    def put(self, name: str, tensor: torch.Tensor) -> None:
        raise AssertionError("nothing is to be written")

    def finish(self) -> None:
        raise AssertionError("nothing is to be written")

    def read(self, name: str, most: int) -> torch.Tensor:
        raise AssertionError("nothing is to be read")

    def release(self) -> int:
        return 0


def offered(*names: str) -> MemorySource:
    return MemorySource({name: torch.zeros(SHAPE) for name in names})


def test_what_is_written() -> None:
    assert sorted(check(offered("c", "b", "a", "ignored"), Store(), partial=False)) == ["a", "b", "c"]
    assert check(offered("c"), Store(), partial=True) == ["c"]
    assert sorted(check(offered("b", "a"), Store(), partial=True)) == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "partial", "words"),
    [
        (("a", "b"), False, r"c \[2, 3\] is missing$"),
        (("a", "c"), True, "b .* the tensors of both are replaced together"),
        (("a", "b", "c", "d"), False, r"d \[2, 3\] has no place in this model"),
        (("ignored",), True, "there are no tensors"),
        (tuple("defghijk"), True, "3 more problems"),
    ],
)
def test_what_does_not_fit(names: tuple[str, ...], partial: bool, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check(offered(*names), Store(), partial=partial)


def test_files_that_change(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1, max_shard_size="50KB")
    source = of_directory(path, read_config(path))
    assert len({one.where for one in source.tensors.values()}) > 1
    assert source.changed() == ""
    file = max(path.glob("*.safetensors"))
    kept = file.read_bytes()
    file.write_bytes(kept[:-8])
    os.utime(file, ns=(1, 1))
    assert file.name in source.changed()
    file.write_bytes(kept)
    source = of_directory(path, read_config(path))
    file.unlink()
    assert file.name in source.changed()
    with pytest.raises(ModelError, match="is missing"):
        of_directory(path, read_config(path))


def test_files_that_are_odd(tmp_path: Path) -> None:
    file, second = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({"a": torch.zeros(SHAPE)}, file)
    save_file({"a": torch.zeros(SHAPE)}, second)
    with pytest.raises(ModelError, match="a is in two files"):
        FileSource({file: [], second: []})
    with pytest.raises(ModelError, match="lacks b, which the index promises"):
        FileSource({file: ["b"]})
    second.write_bytes(b"\x80\x04\x95 pickled")
    with pytest.raises(ModelError, match="is damaged, or no safetensors file"):
        FileSource({second: []})
