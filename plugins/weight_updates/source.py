"""Where new weights come from, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.weight_updates.messages import Origin
from pegboard.toolkit.model.hf_files import read_json_object
from pegboard.toolkit.model.weights import CODES, StoredTensor, checkpoint_files, read_header, read_into

if TYPE_CHECKING:
    from pegboard.core.interfaces.weights import TensorSpec, WeightStore

_SHOWN = 5
_MAY_DIFFER = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "max_position_embeddings"),
    }
)
"""What a config says that changes no number of a forward pass, and what is asked of the served model's alone. All else
that both configs have must agree."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The shape and type of a tensor that is offered, and where it is, for messages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str


class Source(Protocol):
    """New weights."""

    @property
    def tensors(self) -> Mapping[str, Offered]:
        """All of them by name, in the order in which they are read best."""

    @property
    def origin(self) -> Origin | None:
        """The directory from which they can be read again; None: there is none."""

    def read(self, name: str, memory: torch.Tensor | None) -> torch.Tensor | None:
        """Return one of them, None if it has not come yet. It is in the `memory` of its place in the model if that
        saves a copy; otherwise the next one may take its memory. Raises ModelError.
        """

    def wait(self) -> None:
        """Return once the first of them can be read. Raises ModelError."""

    def changed(self) -> str:
        """Return what has changed since it was opened, "" for nothing."""

    def through(self) -> bool:
        """Return whether all that comes has come, also what is not needed. Raises ModelError."""

    def close(self) -> None:
        """Note that nothing more is read."""


class _Here:
    """Of a source that can be read at once, and to its end."""

    origin: Origin | None = None

    def wait(self) -> None:
        """Wait for nothing."""

    def changed(self) -> str:
        return ""

    def through(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing."""


class FileSource(_Here):
    """Tensors of safetensors files, perhaps of a `directory`; `files` have those names at least. Raises ModelError."""

    def __init__(self, files: Mapping[Path, Sequence[str]], directory: Path | None = None) -> None:
        self._stamps = {file: _stamp(file) for file in files}
        if directory is not None:
            self.origin = _origin(directory, self._stamps)
        self._stored: dict[str, tuple[Path, StoredTensor]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        for file, promised in files.items():
            header = read_header(file)
            if missing := [name for name in promised if name not in header]:
                raise ModelError(f"{file} lacks {missing[0]}, which the index promises")
            for name, stored in header.items():
                if name in self._stored:
                    raise ModelError(f"{name} is in two files: {self._stored[name][0]} and {file}")
                self._stored[name] = file, stored

    @property
    def tensors(self) -> Mapping[str, Offered]:
        return {name: Offered(one.shape, one.dtype, f"{file}: ") for name, (file, one) in self._stored.items()}

    def read(self, name: str, memory: torch.Tensor | None) -> torch.Tensor:
        file, stored = self._stored[name]
        try:
            if memory is None:
                # Memory that was there before costs no page faults, which are dearer than what is read into it.
                self._memory = memory_for(stored, self._memory)
                memory = self._memory[: stored.nbytes].view(stored.dtype).view(stored.shape)
            read_into(file, stored, memory)
            return memory
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error}") from error

    def changed(self) -> str:
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                return f"{file} has changed since it was looked at"
        return ""


def memory_for(stored: StoredTensor, memory: torch.Tensor) -> torch.Tensor:
    """Return uint8 memory for a tensor at least: what there is, or new."""
    return memory if memory.numel() >= stored.nbytes else torch.empty(stored.nbytes, dtype=torch.uint8)


def origin_of(directory: Path) -> Origin | None:
    """Return a directory with weights as it is now; None if it has none that can be read."""
    directory = directory.resolve()
    try:
        files = checkpoint_files(directory)
    except (ModelError, OSError):
        return None
    return _origin(directory, {file: _stamp(file) for file in files})


def _origin(directory: Path, stamps: Mapping[Path, tuple[int, int, int]]) -> Origin:
    return Origin(str(directory), {str(file): stamp for file, stamp in stamps.items()})


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return what differs once a file is written to, or replaced: also (0, 0, 0), if it is gone."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def of_directory(directory: Path, hf_config: Mapping[str, object]) -> FileSource:
    """Return the weights of a model directory whose config, if it has one, agrees with that of the served model.
    Raises ModelError.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    config = read_json_object(directory / "config.json")
    for key in sorted(config.keys() - _MAY_DIFFER):
        if (key in hf_config or key == "quantization_config") and config[key] != hf_config.get(key):
            raise ModelError(
                f"{directory / 'config.json'}: {key} is {config[key]!r:.100}, the served model's is "
                f"{hf_config.get(key)!r:.100}: only weights can be replaced"
            )
    return FileSource(checkpoint_files(directory), directory)


class MemorySource(_Here):
    """Tensors of the caller."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def tensors(self) -> Mapping[str, Offered]:
        return {name: Offered(tuple(one.shape), one.dtype, "") for name, one in self._tensors.items()}

    def read(self, name: str, memory: torch.Tensor | None) -> torch.Tensor:
        return self._tensors[name]


def check(source: Source, store: WeightStore, *, partial: bool) -> list[str]:
    """Return the names of the tensors to write. Raises ModelError, with the first problems, for unknown names, other
    shapes, types that are no floats, groups of which a part is missing, and missing tensors but for `partial`.
    """
    expected, offered = store.expected(), source.tensors
    names = [name for name in offered if not store.ignores(name)]
    problems = [*_misfits(names, offered, expected), *_missing(names, expected, partial=partial)]
    if not names and not problems:
        problems = ["there are no tensors"]
    if problems:
        more = f" (and {len(problems) - _SHOWN} more problems)" if len(problems) > _SHOWN else ""
        raise ModelError(f"the weights do not fit: {'; '.join(problems[:_SHOWN])}{more}")
    return names


def _misfits(names: Sequence[str], offered: Mapping[str, Offered], expected: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in names:
        one, shape = offered[name], list(offered[name].shape)
        if name not in expected:
            yield f"{one.where}{name} {shape} has no place in this model"
        elif one.dtype in CODES or not one.dtype.is_floating_point:
            kind = str(one.dtype).removeprefix("torch.")
            yield f"{one.where}{name} {shape} is stored as {kind}: quantised weights cannot be put into a model"
        elif one.shape != expected[name].shape:
            yield f"{one.where}{name} has shape {shape}, the model's is {list(expected[name].shape)}"


def _missing(names: Sequence[str], expected: Mapping[str, TensorSpec], *, partial: bool) -> Iterator[str]:
    there = set(names)
    begun = {expected[name].group for name in names if name in expected} - {""}
    for name, spec in expected.items():
        if name in there:
            continue
        if not partial:
            yield f"{name} {list(spec.shape)} is missing"
        elif spec.group in begun:
            yield f"{name} {list(spec.shape)} is missing: the tensors of {spec.group} are replaced together"
