"""What a backend for adapters gives the native runner: matrices in the form that the library reads.

A site is a matrix of a layer (`number` = 4 * layer + its index in SITES of the library).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.plugins.cpu_native.library import SITES, Additions, LowRankSite, first_that_loads
from pegboard.plugins.cpu_native.weights import PARTS
from pegboard.toolkit.model.linear import Part, Site
from pegboard.toolkit.system.compute import rest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.toolkit.model.decoder_spec import DecoderSpec

NAME = "cpu_native"

LANES, STEP = 16, 32
"""Rows of the packed matrix that share ranks, and columns of a step."""
_LAYER_SITES = len(SITES) - 1
_LINE = 32
"""Matrices begin at multiples of 64 bytes."""


def sites_of(spec: DecoderSpec) -> list[Site]:
    """Return the sites of a model: no experts."""
    sizes = {
        "qkv": ((spec.q_size, spec.kv_size, spec.kv_size), spec.hidden_size),
        "o": ((spec.hidden_size,), spec.q_size),
        "gate_up": ((spec.intermediate_size,) * 2, spec.hidden_size),
        "down": ((spec.hidden_size,), spec.intermediate_size),
    }
    found = []
    for layer in range(spec.num_layers):
        mixed = spec.moe is not None and spec.moe.layers[layer]
        for index, kind in enumerate(SITES[:2] if mixed else SITES[:-1]):
            rows, cols = sizes[kind]
            parts = zip(PARTS[kind], rows, strict=True)
            named = tuple(Part(f"model.layers.{layer}.{name}", count) for name, count in parts)
            found.append(Site(layer * _LAYER_SITES + index, named, cols))
    return found


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to some rows of a site, those from `start` on: b @ a @ x, `a` [rank, cols], `b` [rows, rank]."""

    start: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Packed:
    """A site's matrices as PbLowRank has them: `a` and `b` bf16, `halves` int32 [rows / 16, 3]."""

    a: torch.Tensor
    b: torch.Tensor
    halves: NDArray[np.int32]
    ranks: int


class NativeAdapter:
    """The matrices of an adapter, in one piece of memory."""

    def __init__(self, sites: Mapping[int, Site], factors: Mapping[int, Sequence[Factors]]) -> None:
        packed = {number: _pack(sites[number], parts) for number, parts in factors.items()}
        self.sites = sites
        self.most_ranks = max((matrices.ranks for matrices in packed.values()), default=0)
        self.by_site = (LowRankSite * (max(sites) + 1))()
        self._halves = [matrices.halves for matrices in packed.values()]
        pieces = [(number, name, getattr(matrices, name)) for number, matrices in packed.items() for name in ("a", "b")]
        self._memory = _memory(sum(_rounded(piece.numel(), _LINE) for _, _, piece in pieces))
        self.nbytes = self._memory.nbytes
        at = 0
        for number, name, piece in pieces:
            place = self._memory[at : at + piece.numel()]
            place.copy_(piece)
            rest()
            setattr(self.by_site[number], name, place.data_ptr())
            at += _rounded(piece.numel(), _LINE)
        for number, one in packed.items():
            self.by_site[number].halves, self.by_site[number].ranks = one.halves.ctypes.data, one.ranks


class NativeAdditions:
    """What the adapters of a batch add, as the native runner takes it in `ForwardBatch.additions`: `which` int64
    [tokens] is the index of each token's adapter, -1 for none. `arrays` are `which`, `order`, `begin` and `place` of
    PbAdditions.
    """

    def __init__(self, adapters: Sequence[NativeAdapter], which: NDArray[np.int64]) -> None:
        self.tokens = len(which)
        self._adapters = adapters
        order = np.argsort(which, kind="stable")
        begin = np.searchsorted(which[order], np.arange(len(adapters) + 1))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self.arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in (which, order, begin, place)]
        pointers = (ctypes.c_void_p * len(adapters))(*[ctypes.addressof(adapter.by_site) for adapter in adapters])
        self._pointers = pointers
        pieces = [array.ctypes.data for array in self.arrays]
        most = max(adapter.most_ranks for adapter in adapters)
        self._native = Additions(len(adapters), most, ctypes.addressof(pointers), *pieces)

    @property
    def pointer(self) -> int:
        """Where the library finds it, as long as this object lives."""
        return ctypes.addressof(self._native)

    def library(self) -> ctypes.CDLL:
        return first_that_loads("auto", quiet=True)[1]

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to a product that is a tensor; the runner itself does not call this."""
        shape = self._adapters[0].sites[site]
        rows = _rows(shape)
        found = torch.zeros(len(x), len(rows))
        values = x.to(torch.bfloat16).contiguous()
        blocks = len(rows) // (2 * LANES)
        arguments = (values.data_ptr(), len(x), shape.cols, blocks, found.data_ptr())
        if self.library().pb_add(self.pointer, site, *arguments):
            raise MemoryError("the native library could not get memory")
        real = rows >= 0
        out[:, torch.from_numpy(rows[real])] += found[:, torch.from_numpy(real)].to(out.dtype)


def _rounded(number: int, to: int) -> int:
    return (number + to - 1) // to * to


def _memory(numbers: int) -> torch.Tensor:
    """Return zeros bf16, in large pages where the system has them, which go back to the system with the tensor."""
    memory = mmap.mmap(-1, max(1, numbers) * 2)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16)


def _interleaved(site: Site) -> bool:
    """Return whether the packed matrix has 16 rows of the one part, then 16 of the other."""
    return SITES[site.number % _LAYER_SITES] == "gate_up"


def _rows(site: Site) -> NDArray[np.int64]:
    """Return which row of the site each row of the packed matrix is, -1 for none."""
    if not _interleaved(site):
        rows = np.arange(_rounded(site.rows, 2 * LANES))
        return np.where(rows < site.rows, rows, -1)
    each = site.parts[0].rows
    first = np.arange(_rounded(each, LANES))
    halves = np.where(first < each, first, -1).reshape(-1, LANES)
    return np.stack([halves, np.where(halves < 0, -1, halves + each)], axis=1).reshape(-1)


def _pack(site: Site, parts: Sequence[Factors]) -> _Packed:
    rest()
    if any(part.start % LANES for part in parts) and not _interleaved(site):
        parts = [_joined(site, parts)]
    ranks = sum(len(part.a) for part in parts)
    rows, cols = _rounded(ranks, LANES), _rounded(site.cols, STEP)
    a = torch.zeros(rows, cols, dtype=torch.bfloat16)
    a[:ranks, : site.cols] = torch.cat([part.a for part in parts])
    a = a.view(rows // LANES, LANES, cols // STEP, STEP // 2, 2).permute(0, 2, 3, 1, 4)
    halves = np.zeros((len(_rows(site)) // LANES, 3), np.int32)
    bs, first, at = [], 0, 0
    for part, places in zip(parts, _places(site, parts), strict=True):
        rank, count = len(part.a), len(places)
        b = torch.zeros(count * LANES, rank, dtype=torch.bfloat16)
        b[: len(part.b)] = part.b
        bs.append(b.view(count, LANES, rank).transpose(1, 2).reshape(-1))
        halves[places, 0], halves[places, 1], halves[places, 2] = first, rank, at + rank * np.arange(count)
        first, at = first + rank, at + rank * count
    return _Packed(a.reshape(-1), torch.cat(bs), halves, rows)


def _places(site: Site, parts: Sequence[Factors]) -> Iterator[NDArray[np.int64]]:
    """Yield for each part the numbers of its 16 rows of the packed matrix, in order."""
    for part in parts:
        count = _rounded(len(part.b), LANES) // LANES
        if _interleaved(site):
            yield 2 * np.arange(count) + bool(part.start)
        else:
            yield part.start // LANES + np.arange(count)


def _joined(site: Site, parts: Sequence[Factors]) -> Factors:
    """Return parts as one that has all rows, for sizes of which 16 rows belong to several parts."""
    b = torch.zeros(site.rows, sum(len(part.a) for part in parts))
    first = 0
    for part in parts:
        b[part.start : part.start + len(part.b), first : first + len(part.a)] = part.b
        first += len(part.a)
    return Factors(0, torch.cat([part.a for part in parts]), b)
