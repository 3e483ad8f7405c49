"""Contract: formats of quantised weights, and products with them. What plugins that bring one import of this one."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.toolkit.model.coded import CodedMatrix, StoredSlot
    from pegboard.toolkit.model.experts import ExpertsMethod
    from pegboard.toolkit.model.layouts import Codes, Layout
    from pegboard.toolkit.model.linear import LinearMethod, Site


@dataclass(frozen=True, slots=True)
class FormatContext:
    """A checkpoint: what its config.json says of quantisation, and the tensors of all its files by name."""

    config: Mapping[str, object]
    tensors: Mapping[str, StoredSlot]

    @property
    def method(self) -> str:
        """Its `quant_method`, in small letters; "" where it does not say."""
        return str(self.config.get("quant_method") or "").lower()

    def other_method(self, *methods: str) -> str | None:
        """Return None where its method is one of these, or the reason why a format of these does not read it."""
        return None if self.method in methods else f"it reads quant_method {' and '.join(methods)}"

    def need(self, name: str, why: str) -> StoredSlot:
        """Return a tensor. Raises ModelError where there is none: ``why`` names the one that it belongs to."""
        if name not in self.tensors:
            raise ModelError(f"the checkpoint lacks {name}, which {why} needs")
        return self.tensors[name]


class WeightFormat(abc.ABC, Generic[OptionsT]):
    """A way to keep quantised weights. Tensors decide what is quantised, and not the lists of a config: a matrix is
    where its codes are in the checkpoint.

    Built from the headers of the files. Shapes and types are known then, and what cannot be is refused before there is
    memory for anything.
    """

    def __init__(self, options: OptionsT, ctx: FormatContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    @abc.abstractmethod
    def supports(cls, options: OptionsT, ctx: FormatContext) -> str | None:
        """Return None where the checkpoint is of this format, or why it is not."""

    @abc.abstractmethod
    def matrices(self) -> Mapping[str, CodedMatrix]:
        """Return the quantised matrices by the names of the plain tensors that they stand for: ``x.q_proj.weight``.

        `layouts.exact` of a matrix is what the format's authors mean by its tensors. Raises ModelError, naming file,
        tensor and shape, for codes without scales, scales without codes, and sizes that do not fit.
        """

    def unused(self) -> Collection[str]:
        """Return names of tensors that say nothing of weights, such as scales of activations; none by default."""
        return ()


@dataclass(frozen=True, slots=True)
class LinearContext:
    """Where products are computed, and in which type."""

    device: torch.device
    dtype: torch.dtype


class Linears(abc.ABC, Generic[OptionsT]):
    """Makes the products of a network's quantised sites."""

    def __init__(self, options: OptionsT, ctx: LinearContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: LinearContext) -> str | None:
        """Return None, or the reason why it cannot compute on this device, or in this type."""
        return None

    @abc.abstractmethod
    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        """Return the product of a site, of the layout and the codes of each of its parts, which are given away.

        Parts may differ in their layouts, and some may be PLAIN. The weights that it multiplies by are
        `layouts.exact` of each part, in the type of the context, or in float32, where it does not round them.
        """

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        """Return the products of a site with experts, of the parts of each, which are given away. What is said of
        `build` holds for each expert; by default each has a product of its own, made by that.
        """
        from pegboard.toolkit.model.experts import EachExpert

        return EachExpert([self.build(site, parts) for parts in experts], site.rows)
