"""Reading safetensors checkpoints, single or sharded, straight into the buffers of a network. Never pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.toolkit.hf_files import read_json_object

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAP_BYTES = 256_000_000
"""A file is mapped anew after this many bytes, so that pages already read do not count as ours any more."""
_SHOWN = 5


def checkpoint_files(directory: str | os.PathLike[str]) -> dict[Path, list[str]]:
    """The safetensors files of a model directory, each with the tensor names that its index promises.

    Raises ModelError where there are none, or one that the index names is missing.
    """
    path = Path(directory)
    weight_map = read_json_object(path / _INDEX).get("weight_map")
    files: dict[Path, list[str]] = {}
    if isinstance(weight_map, dict):
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ModelError(f"{path / _INDEX}: {file!r} is no file name")
            files.setdefault(path / file, []).append(name)
    elif (path / _INDEX).exists():
        raise ModelError(f"{path / _INDEX} has no weight_map")
    else:
        single = path / _SINGLE
        found = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        files = {file: [] for file in found}
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, though {_INDEX} names it; fetch the checkpoint again")
    if not files:
        raise ModelError(_no_weights(path))
    return files


def _no_weights(path: Path) -> str:
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        return (
            f"{path} has pickled weights only, and unpickling runs whatever code they hold. Save them as safetensors: "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return f"{path} has no *.safetensors file"


def load_weights(
    directory: str | os.PathLike[str],
    targets: Mapping[str, Tensor],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
) -> None:
    """Copy every tensor of the checkpoint into the buffer that `targets` gives for its name, in the buffer's dtype.

    Buffers keep their memory; besides them only part of a memory-mapped file is held. Names for which `ignore` is true
    are skipped. Raises ModelError for a tensor that has no buffer, a buffer that got no tensor, and shapes that differ;
    it names the file, the tensors and the shapes.
    """
    loaded: set[str] = set()
    problems: list[str] = []
    files = checkpoint_files(directory)
    for file, promised in files.items():
        names = _names(file)
        problems += [f"{file} lacks {name}, which the index promises" for name in promised if name not in names]
        wanted = []
        for name, shape in names.items():
            if ignore(name):
                continue
            if name not in targets:
                problems.append(f"{file}: {name} {shape} has no place in this model")
            elif list(targets[name].shape) != shape:
                problems.append(f"{file}: {name} has shape {shape}, the config asks for {list(targets[name].shape)}")
            else:
                wanted.append(name)
        if not problems:
            for name, tensor in _tensors(file, wanted):
                targets[name].copy_(tensor)
                loaded.add(name)
    if not problems:
        absent = [name for name in targets if name not in loaded]
        problems = [f"{directory} lacks {name} {list(targets[name].shape)}" for name in absent]
    if problems:
        more = f" (and {len(problems) - _SHOWN} more problems)" if len(problems) > _SHOWN else ""
        raise ModelError(f"the checkpoint does not fit its config: {'; '.join(problems[:_SHOWN])}{more}")


def _names(file: Path) -> dict[str, list[int]]:
    """Names and shapes of a file's tensors."""
    with _opened(file) as tensors:
        return {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no mapping


def _tensors(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, memory-mapped; each is valid until the next one is asked for."""
    at = 0
    while at < len(names):
        taken = 0
        with _opened(file) as tensors:
            while at < len(names) and taken < _MAP_BYTES:
                tensor: Tensor = tensors.get_tensor(names[at])
                taken += tensor.nbytes
                yield names[at], tensor
                at += 1


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged, or no safetensors file: {error}") from error
