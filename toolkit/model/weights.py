"""Reading safetensors checkpoints, single or sharded, straight into the buffers of a network. Never pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.hf_files import read_json_object
from pegboard.toolkit.model.staging import Stored, stage
from pegboard.toolkit.system.progress import progress

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN = 5
_PIECE = 2**14
"""Numbers that are read before they are converted: 64 KiB of float32. Few enough that torch converts them in this
thread, since to wait for others at every piece costs more than they help."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {_DTYPES[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I32", "I8", "U8")}
"""Types that quantised matrices are made of: scales, and perhaps more, belong to their numbers."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a checkpoint's tensor of `shape`: `into` gets what begins at `start` of its dimension `dim`, 0 or 1 (of
    a matrix), and has all of the other dimensions.
    """

    into: Tensor
    dim: int
    start: int
    shape: tuple[int, ...]

    @property
    def is_meta(self) -> bool:
        return self.into.is_meta

    @property
    def device(self) -> torch.device:
        return self.into.device

    def is_floating_point(self) -> bool:
        return self.into.is_floating_point()


Target: TypeAlias = Tensor | Slice
"""Where a tensor of a checkpoint, or a part of it, goes."""


class CodedTensor(Protocol):
    """A tensor of quantised weights, which several tensors of a checkpoint make up (`toolkit.model.coded`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    def fill(self, target: Tensor) -> None:
        """Write its numbers into `target`, of its shape."""


class CodedTensors(Protocol):
    """Those of a checkpoint by name, and the names of all tensors that they are made of, or that are of no use."""

    @property
    def matrices(self) -> Mapping[str, CodedTensor]: ...
    @property
    def parts(self) -> frozenset[str]: ...


def checkpoint_files(directory: str | os.PathLike[str]) -> dict[Path, list[str]]:
    """Return the safetensors files of a model directory, each with the tensor names that its index promises.

    Raises ModelError where there are none, or one that the index names is missing.
    """
    path = Path(directory)
    weight_map = read_json_object(path / _INDEX).get("weight_map")
    files: dict[Path, list[str]] = {}
    if isinstance(weight_map, dict):
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{path / _INDEX}: {file!r} is not a file name")
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
    targets: Mapping[str, Target],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    coded: CodedTensors | None = None,
) -> None:
    """Copy every tensor of the checkpoint into the buffer that `targets` gives for its name, in the buffer's dtype.

    On a CPU a tensor whose dtype is the buffer's is read from the file straight into the buffer, another in small
    pieces; what goes into a strided buffer passes through a copy of itself, so memory beyond the buffers is that of one
    tensor at most. What goes to a GPU is read ahead, see `staging`. Where a buffer is a Slice, that part of the tensor
    alone is read. Names for which `ignore` is true are skipped. Tensors that are `coded` are read by that. Buffers on
    the device `meta` are left to the caller. Raises ModelError for a tensor that has no buffer, a buffer that got no
    tensor, and shapes that differ; it names the file, the tensors and the shapes.
    """
    files = {
        file: {name: one for name, one in stored.items() if not targets[name].is_meta}
        for file, stored in _matched(directory, targets, ignore, coded).items()
    }
    matrices = {} if coded is None else {name: one for name, one in coded.matrices.items() if name in targets}
    matrices = {name: one for name, one in matrices.items() if not targets[name].is_meta}
    plain = sum(one.nbytes for stored in files.values() for one in stored.values())
    with progress("reading weights", plain + sum(one.nbytes for one in matrices.values())) as read:
        for name, matrix in matrices.items():
            _fill_coded(matrix, targets[name])
            read(matrix.nbytes)
        devices = {target.device for target in targets.values() if not target.is_meta}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            for count in stage(_places(files, targets), device):
                read(count)
            return
        for file, stored in files.items():
            with file.open("rb", buffering=0) as stream:
                for name, tensor in stored.items():
                    _read_part(stream, tensor, targets[name])
                    read(tensor.nbytes)


def _fill_coded(matrix: CodedTensor, target: Target) -> None:
    """Write a matrix's numbers, or those of them that a Slice is for, into `target`."""
    if isinstance(target, Tensor):
        matrix.fill(target)
        return
    whole = torch.empty(matrix.shape, dtype=target.into.dtype, device=target.device)
    matrix.fill(whole)
    target.into.detach().copy_(whole.narrow(target.dim, target.start, target.into.shape[target.dim]))


class WeightsReader:
    """Reads tensors of a checkpoint some at a time, so that not all of them need be in memory. What is said of
    `load_weights` holds, of which the constructor raises what concerns names and shapes: its `targets` may be on the
    meta device. For CPUs.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        targets: Mapping[str, Target],
        *,
        ignore: Callable[[str], bool] = lambda name: False,
        coded: CodedTensors | None = None,
    ) -> None:
        matched = _matched(directory, targets, ignore, coded)
        self._stored = {name: (file, one) for file, stored in matched.items() for name, one in stored.items()}
        self._coded = {} if coded is None else {name: one for name, one in coded.matrices.items() if name in targets}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their files."""
        return sum(map(self.stored, (*self._stored, *self._coded)))

    def stored(self, name: str) -> int:
        """Return the bytes of a tensor in its file."""
        return self._coded[name].nbytes if name in self._coded else self._stored[name][1].nbytes

    def read(self, name: str, target: Target) -> None:
        """Write a tensor's numbers into `target`, of its shape, in its dtype; or the part of them that a Slice is
        for.
        """
        if name in self._coded:
            _fill_coded(self._coded[name], target)
            return
        file, tensor = self._stored[name]
        with file.open("rb", buffering=0) as stream:
            _read_part(stream, tensor, target)


def _places(
    files: Mapping[Path, Mapping[str, StoredTensor]], targets: Mapping[str, Target]
) -> list[tuple[Stored, Tensor]]:
    found = []
    for file, stored in files.items():
        for name, tensor in stored.items():
            target = targets[name]
            assert isinstance(target, Tensor), "tensors are not sliced on their way to a GPU"
            found.append((Stored(file, tensor.dtype, tensor.shape, tensor.start), target))
    return found


def check_weights(
    directory: str | os.PathLike[str],
    targets: Mapping[str, Target],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    coded: CodedTensors | None = None,
) -> None:
    """Raise what `load_weights` would raise for buffers of these shapes, which may be on the meta device: so that sizes
    which the config alone asks for are refused before there is memory for them.
    """
    _matched(directory, targets, ignore, coded)


def _matched(
    directory: str | os.PathLike[str],
    targets: Mapping[str, Target],
    ignore: Callable[[str], bool],
    coded: CodedTensors | None,
) -> dict[Path, dict[str, StoredTensor]]:
    """Return the plain tensors that `targets` wants by file and name. Every one of these, and of the coded ones, is
    there, in its shape, and wanted.
    """
    parts = frozenset[str]() if coded is None else coded.parts
    matrices = {} if coded is None else {name: one for name, one in coded.matrices.items() if not ignore(name)}
    found: dict[Path, dict[str, StoredTensor]] = {}
    problems: list[str] = []
    for file, promised in checkpoint_files(directory).items():
        stored = read_header(file)
        problems += [f"{file} lacks {name}, which the index promises" for name in promised if name not in stored]
        left = {name: one for name, one in stored.items() if not (name in parts or ignore(name))}
        found[file] = {name: one for name, one in left.items() if not _is_spare(file, name, one, targets, matrices)}
        for name, tensor in found[file].items():
            problems += _misfit(file, name, tensor.shape, targets) or _unread(file, name, tensor, targets[name])
    for name, matrix in matrices.items():
        problems += _misfit(matrix.file, name, matrix.shape, targets)
    if not problems:
        names = {name for stored in found.values() for name in stored} | matrices.keys()
        problems = [f"{directory} lacks {name} {list(targets[name].shape)}" for name in targets if name not in names]
    if problems:
        more = f" (and {len(problems) - _SHOWN} more problems)" if len(problems) > _SHOWN else ""
        raise ModelError(f"the checkpoint does not fit its config: {'; '.join(problems[:_SHOWN])}{more}")
    return found


def _misfit(file: Path, name: str, shape: tuple[int, ...], targets: Mapping[str, Target]) -> list[str]:
    """Return what is wrong with a tensor's name or shape."""
    if name not in targets:
        return [f"{file}: {name} {list(shape)} has no place in this model"]
    if tuple(targets[name].shape) != shape:
        return [f"{file}: {name} has shape {list(shape)}, the config asks for {list(targets[name].shape)}"]
    return []


def _is_spare(
    file: Path, name: str, tensor: StoredTensor, targets: Mapping[str, Target], matrices: Mapping[str, object]
) -> bool:
    """Whether it is the bias of a quantised matrix that has none: AutoGPTQ once wrote zeros for all of them."""
    module, dot, kind = name.rpartition(".")
    if kind != "bias" or name in targets or f"{module}{dot}weight" not in matrices:
        return False
    with file.open("rb") as stream:
        stream.seek(tensor.start)
        return not any(stream.read(tensor.nbytes))


def _unread(file: Path, name: str, tensor: StoredTensor, target: Target) -> list[str]:
    """Return what is wrong with a matrix whose numbers are codes of a format that nothing here reads."""
    if tensor.dtype not in CODES or len(tensor.shape) < 2 or not target.is_floating_point():
        return []
    return [f"{file}: {name} {list(tensor.shape)} {unexplained(tensor.dtype)}"]


def unexplained(dtype: torch.dtype) -> str:
    """Return what is wrong with a matrix of this type that no format explains."""
    return f"is stored as {str(dtype).removeprefix('torch.')}, and nothing says what these numbers mean"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file: `start` is the offset of its first byte. Little-endian, row-major, unpadded."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in the order of the file. Raises ModelError for a damaged file.

    The safetensors library checks the header; the bytes are then read without it, because its memory map costs a page
    fault per 4 KiB, several times the price of reading.
    """
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is damaged, or no safetensors file: {error}; fetch it again, or delete its folder if that is a "
            f"conversion in the cache"
        ) from error
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ModelError(f"{file}: {name} is stored as {entry['dtype']}, which is not supported")
        start, stop = entry["data_offsets"]
        found[name] = StoredTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + start, stop - start)
    return found


def read_tensor(file: Path, stored: StoredTensor) -> Tensor:
    """Return a tensor of a file as it is stored, on the CPU. Raises ModelError where the file ends early."""
    memory = torch.empty(stored.shape, dtype=stored.dtype)
    read_into(file, stored, memory)
    return memory


def read_into(file: Path, stored: StoredTensor, target: Tensor) -> None:
    """Read a tensor of a file into another of its shape, converted. Raises ModelError where the file ends early."""
    with file.open("rb", buffering=0) as stream:
        _read(stream, stored, target)


def _read_part(stream: FileIO, stored: StoredTensor, target: Target) -> None:
    if isinstance(target, Tensor):
        _read(stream, stored, target)
        return
    into, size = target.into, stored.dtype.itemsize
    if target.dim == 0:
        row = stored.nbytes // stored.shape[0]
        part = StoredTensor(stored.dtype, tuple(into.shape), stored.start + target.start * row, into.shape[0] * row)
        _read(stream, part, into)
        return
    rows = torch.empty(into.shape, dtype=stored.dtype)
    for number, row_memory in enumerate(rows):
        stream.seek(stored.start + (number * stored.shape[1] + target.start) * size)
        _fill(stream, row_memory)
    into.copy_(rows)


def _read(stream: FileIO, stored: StoredTensor, target: Tensor) -> None:
    stream.seek(stored.start)
    if target.device.type != "cpu" or not target.is_contiguous():
        memory = torch.empty(stored.shape, dtype=stored.dtype)
        _fill(stream, memory)
        target.copy_(memory)
    elif target.dtype == stored.dtype:
        _fill(stream, target)
    else:
        # Piece by piece, each still in the cache when it is converted, and all through the same pages of memory.
        flat = target.detach().reshape(-1)
        piece = torch.empty(min(_PIECE, flat.numel()), dtype=stored.dtype)
        for start in range(0, flat.numel(), _PIECE):
            part = flat[start : start + _PIECE]
            _fill(stream, piece[: part.numel()])
            part.copy_(piece[: part.numel()])


def _fill(stream: FileIO, memory: Tensor) -> None:
    view = memory.detach().reshape(-1).view(torch.uint8).numpy().data
    while view:
        count = stream.readinto(view)
        if not count:
            raise ModelError(f"{stream.name!r} ended early; it was changed while it was read")
        view = view[count:]
