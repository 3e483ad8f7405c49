"""Quantised weights of a checkpoint: which tensors of its files make up a matrix, and how they become `Codes`.

A format of weights (the contract `weight_format` of the plugin `quantization`) says it, and a model's family and runner
find it as `quantized_weights` of their context: they read such matrices as numbers, or have products made of the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.toolkit.model.experts import ExpertsMethod
from pegboard.toolkit.model.layouts import PLAIN, Code, Codes, Layout, cut_codes, exact
from pegboard.toolkit.model.linear import LinearMethod, Part, Site
from pegboard.toolkit.model.ranks import Cut
from pegboard.toolkit.model.weights import StoredTensor, checkpoint_files, read_header, read_tensor

SERVICE = "quantized_weights"
"""Name of the `QuantizedWeights` in `ModelContext.services`."""


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A tensor of a checkpoint, by name, and its file."""

    name: str
    file: Path
    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        """Return it as it is stored, on the CPU. Raises ModelError where the file ends early."""
        return read_tensor(self.file, self.tensor)

    def wrong(self, what: str) -> ModelError:
        """Return an error that names file, tensor, type and shape, and says `what` is wrong."""
        kind = str(self.dtype).removeprefix("torch.")
        return ModelError(f"{self.file}: {self.name} {kind} {list(self.shape)} {what}")


def slots_of(directory: Path) -> dict[str, StoredSlot]:
    """Return all tensors of a checkpoint by name. Raises ModelError where a file is missing or damaged."""
    return {
        name: StoredSlot(name, file, tensor)
        for file in checkpoint_files(directory)
        for name, tensor in read_header(file).items()
    }


class Blocks(NamedTuple):
    """What `Codes` has beside its codes."""

    scales: Tensor | None = None
    zeros: Tensor | None = None
    groups: Tensor | None = None


def _no_blocks(tensors: Mapping[str, Tensor]) -> Blocks:
    return Blocks()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix as a checkpoint keeps it, [rows, cols] with output sizes first, or several of a size, all their rows in
    one. `shape` is that of the plain tensor which it stands for.

    `unpack` makes canonical codes of the tensor `codes`, on any device; `blocks` makes the rest of the tensors `slots`,
    by the names that they have there. `arrange` makes the plain tensor of the matrix, where they differ.
    """

    layout: Layout
    shape: tuple[int, ...]
    codes: StoredSlot
    unpack: Callable[[Tensor], Tensor] = _unchanged
    slots: Mapping[str, StoredSlot] = field(default_factory=dict)
    blocks: Callable[[Mapping[str, Tensor]], Blocks] = _no_blocks
    arrange: Callable[[Tensor], Tensor] = _unchanged

    @property
    def file(self) -> Path:
        return self.codes.file

    @property
    def names(self) -> list[str]:
        """The checkpoint's tensors that it is made of."""
        return [self.codes.name, *(slot.name for slot in self.slots.values())]

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.codes.tensor.nbytes + sum(slot.tensor.nbytes for slot in self.slots.values())

    def read(self, device: torch.device) -> Codes:
        """Return its codes on a device."""
        tensors = {role: slot.read().to(device) for role, slot in self.slots.items()}
        return Codes(self.unpack(self.codes.read().to(device)), *self.blocks(tensors))

    def fill(self, target: Tensor) -> None:
        """Write its exact numbers into `target`, of `shape`, rounded to its dtype once."""
        target.detach().copy_(self.arrange(exact(self.layout, self.read(target.device), target.dtype)))

    def check(self) -> None:
        """Read all but the codes. Raises ModelError for scales, zeros and groups that no matrix can have."""
        found = self.blocks({role: slot.read() for role, slot in self.slots.items()})
        scales = found.scales
        if scales is not None:
            numbers = scales.float()
            if self.layout.code.integer:  # AutoRound writes negative ones
                rule, some = "scales are finite, and not 0", numbers != 0
            elif self.layout.code in (Code.NF4, Code.FP4):  # of a block of zeros, 0 or what rounding has left
                rule, some = "scales are finite", torch.ones_like(numbers, dtype=torch.bool)
            else:  # stored in 8 bits, the scale of a block of tiny numbers may be 0
                rule = "scales are positive and finite"
                some = numbers >= 0 if self._slot("scales").dtype.itemsize == 1 else numbers > 0
            if not bool((fine := torch.isfinite(numbers) & some).all()):
                worst = numbers[~fine][0].item()
                raise self._slot("scales").wrong(f"has a scale of {worst}; {rule}")
        if found.groups is not None and scales is not None:
            low, high = int(found.groups.min()), int(found.groups.max())
            if low < 0 or high >= scales.shape[1]:
                raise self._slot("groups").wrong(
                    f"has columns of the groups {low} to {high}, and there are scales of {scales.shape[1]}"
                )

    def _slot(self, role: str) -> StoredSlot:
        return self.slots.get(role, self.codes)


class MakesLinear(Protocol):
    """What makes products of codes: a provider of the contract `linear`."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        """Return a site's product, of the layout and the codes of each of its parts, which are given away."""

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        """Return the products of a site with experts, likewise, of the parts of each expert."""


class QuantizedWeights:
    """The quantised weights of a checkpoint: `matrices` by the names of the plain tensors that they stand for, and the
    tensors of its files that are `unused`.
    """

    def __init__(
        self,
        matrices: Mapping[str, CodedMatrix],
        unused: Collection[str],
        tensors: Mapping[str, StoredSlot],
        linears: MakesLinear,
    ) -> None:
        self.matrices = matrices
        self.parts = frozenset(unused).union(*(matrix.names for matrix in matrices.values()))
        self._tensors = tensors
        self._linears = linears

    def linear(
        self, site: Site, names: Sequence[str], device: torch.device, cuts: Sequence[tuple[int, Cut]] = ()
    ) -> LinearMethod:
        """Return the product of a site, whose parts have these names in the checkpoint. Some of them may be plain. Of
        each part only the rows (0) or columns (1) of its cut are kept, if there are `cuts`, which the site's sizes
        leave out of account. Raises ModelError where codes cannot be cut there.
        """
        parts = self._read(names, device)
        if cuts:
            parts = [self._cut(name, part, *cut) for name, part, cut in zip(names, parts, cuts, strict=True)]
        return self._linears.build(_local(site, cuts), parts)

    def experts(self, site: Site, names: Sequence[Sequence[str]], device: torch.device) -> ExpertsMethod:
        """Return the products of a site with experts, of whose parts these are the names, expert by expert."""
        return self._linears.build_experts(site, [self._read(parts, device) for parts in names])

    def stacked_experts(self, site: Site, name: str, device: torch.device) -> ExpertsMethod:
        """Return the products of a site with experts, of which one tensor of the checkpoint has all matrices, one below
        the other.
        """
        matrix = self._matrix(name)
        codes = matrix.read(device)
        bounds = [(expert * site.rows, (expert + 1) * site.rows) for expert in range(site.experts)]
        experts = [[(matrix.layout, cut_codes(matrix.layout, codes, 0, *part))] for part in bounds]
        return self._linears.build_experts(site, experts)

    def _read(self, names: Sequence[str], device: torch.device) -> list[tuple[Layout, Codes]]:
        matrices = [self._matrix(name) for name in names]
        return [(matrix.layout, matrix.read(device)) for matrix in matrices]

    def _matrix(self, name: str) -> CodedMatrix:
        return self.matrices.get(name) or _plain(self._tensors[name])

    def _cut(self, name: str, part: tuple[Layout, Codes], dim: int, cut: Cut) -> tuple[Layout, Codes]:
        layout, codes = part
        try:
            return layout, cut_codes(layout, codes, dim, cut.start, cut.start + cut.length)
        except ValueError as error:
            what = ("rows", "columns")[dim]
            text = f"is {layout}, and its {what} cannot be cut for ranks: {error}"
            raise self._matrix(name).codes.wrong(text) from error


def _local(site: Site, cuts: Sequence[tuple[int, Cut]]) -> Site:
    """Return the site as it is on this rank."""
    if not cuts:
        return site
    (dim, first), *_ = cuts
    if dim == 1:
        return replace(site, cols=first.length)
    parts = zip(site.parts, cuts, strict=True)
    return replace(site, parts=tuple(Part(part.name, cut.length) for part, (_, cut) in parts))


def _plain(slot: StoredSlot) -> CodedMatrix:
    return CodedMatrix(PLAIN, slot.shape, slot)


def quantized_weights(model: ModelContext) -> QuantizedWeights | None:
    """Return what there is of quantised weights in a model's checkpoint; None for plain ones."""
    found = model.services.get(SERVICE)
    return found if isinstance(found, QuantizedWeights) else None
