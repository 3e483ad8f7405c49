"""Reading an adapter: its tensors are checked against its config and the sites of the network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.adapters.api import AdapterWeights, LowRank
from pegboard.plugins.adapters.peft import CONFIG, Pair, PeftConfig, pairs_of, read_config
from pegboard.toolkit.model.coded import StoredSlot
from pegboard.toolkit.model.weights import read_header
from pegboard.toolkit.system.compute import rest

if TYPE_CHECKING:
    from pegboard.toolkit.model.linear import Site

WEIGHTS = "adapter_model.safetensors"
_PIECE = 2**18
"""Bytes of a file that are read at once for its digest."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter, its largest rank, its size in bytes once it has type `dtype`, and a digest of its files."""

    weights: AdapterWeights
    rank: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a site: the rows from `start` on."""

    number: int
    start: int
    rows: int
    cols: int


class AdapterReader:
    """Reads adapters for a network with these sites, which computes in `dtype`."""

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, max_rank: int) -> None:
        self._places: dict[str, _Place] = {}
        self._dtype = dtype
        self._max_rank = max_rank
        for site in sites:
            start = 0
            for part in site.parts:
                self._places[part.name] = _Place(site.number, start, part.rows, site.cols)
                start += part.rows

    def read(self, directory: Path) -> ReadAdapter:
        """Return the adapter in a directory. Raises ModelError, naming file and tensor, for one that is damaged, not
        supported, or for another model.
        """
        config = read_config(directory)
        file = directory / WEIGHTS
        if not file.is_file():
            pickled = any(directory.glob("*.bin"))
            why = "pickled files are not read: save it with safe_serialization=True" if pickled else "it is missing"
            raise ModelError(f"{file}: {why}")
        try:
            digest = _digest(directory / CONFIG, file)
            stored = {name: StoredSlot(name, file, tensor) for name, tensor in read_header(file).items()}
            weights = self._weights(file, config, stored)
            if _digest(directory / CONFIG, file) != digest:
                raise ModelError(f"{file} or {CONFIG} has changed while it was read; load it again")
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
        parts = [part for parts in weights.sites.values() for part in parts]
        numbers = sum(part.a.numel() + part.b.numel() for part in parts)
        return ReadAdapter(weights, max(len(part.a) for part in parts), numbers * self._dtype.itemsize, digest)

    def _weights(self, file: Path, config: PeftConfig, stored: Mapping[str, StoredSlot]) -> AdapterWeights:
        pairs = pairs_of(file, list(stored))
        if not pairs:
            raise ModelError(f"{file} has no tensors")
        found: dict[int, list[LowRank]] = {}
        missing = {name for name in self._places if config.targets(name)}
        for pair in pairs:
            place = self._place(file, pair)
            name = next(name for name, one in self._places.items() if one is place)
            if not config.targets(pair.module) and not config.targets(name):
                raise ModelError(f"{file}: {pair.a} is of {name}, which {CONFIG} does not target")
            missing.discard(name)
            found.setdefault(place.number, []).append(self._pair(config, pair, place, stored))
        if missing and config.target_modules != "all-linear":
            raise ModelError(f"{file}: tensors of {min(missing)} are missing, which {CONFIG} targets")
        return AdapterWeights({number: tuple(sorted(parts, key=_start)) for number, parts in found.items()})

    def _place(self, file: Path, pair: Pair) -> _Place:
        """Return where a pair belongs. Adapters of a bare body lack the prefix of its place in the model, and those of
        a larger model have one more.
        """
        module = pair.module.replace("language_model.", "")
        place = self._places.get(module) or self._places.get(f"model.{module}")
        if place is None:
            raise ModelError(f"{file}: {pair.a} is of {pair.module}, which is not a linear layer that takes adapters")
        return place

    def _pair(self, config: PeftConfig, pair: Pair, place: _Place, stored: Mapping[str, StoredSlot]) -> LowRank:
        rank, a, b = config.rank(pair.module), stored[pair.a], stored[pair.b]
        if rank > self._max_rank:
            raise a.wrong(f"has rank {rank}, adapters.max_rank is {self._max_rank}")
        tensors = (_checked(a, (rank, place.cols)), _checked(b, (place.rows, rank)))
        return LowRank(place.start, *tensors, config.scale(pair.module))


def _checked(slot: StoredSlot, shape: tuple[int, int]) -> torch.Tensor:
    """Return a tensor. Raises ModelError for another shape, for integers, and for numbers that are not finite."""
    if slot.shape != shape:
        raise slot.wrong(f"does not have the shape {list(shape)}, which config and model ask for")
    if slot.dtype not in _FLOATS:
        raise slot.wrong("is not of a type that is supported")
    tensor = slot.read()
    if not bool(torch.isfinite(tensor).all()):
        raise slot.wrong("has numbers that are not finite")
    rest()
    return tensor


def _start(part: LowRank) -> int:
    return part.start


def _digest(*files: Path) -> str:
    """Return a digest of files' contents, in hexadecimal."""
    found = hashlib.sha256()
    for path in files:
        one = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                one.update(piece)
                rest()
        found.update(one.digest())
    return found.hexdigest()[:32]
