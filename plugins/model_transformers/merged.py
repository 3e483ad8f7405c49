"""Linear layers of one module that read the same input, as one product.

Which ones these are is seen in the run without weights: they are called with the same tensor. In a pass over a batch
the one that is called first computes all of them, and the others return their columns of it. The module around them is
not changed. In a pass of the model's own attention, which is the reference, each computes by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.plugins.model_transformers import bridge
from pegboard.toolkit.model.layers import FusedLinear
from pegboard.toolkit.model.linear import LinearMethod, Part, Site

if TYPE_CHECKING:
    from pegboard.toolkit.model.coded import QuantizedWeights

Inputs = Mapping[nn.Module, Sequence[Tensor]]
"""The first arguments of modules, one for each call, in the order of the first calls."""


def with_one_input(model: nn.Module, inputs: Inputs) -> tuple[tuple[str, ...], ...]:
    """Return the names of linear layers that are called, in groups of those that one module calls with the same tensor,
    once in a pass: in the order in which they are called. Layers whose weights are used in several places are not
    among them.
    """
    names = {module: name for name, module in model.named_modules()}
    shared, found = _used_twice(model), dict[tuple[str, int], list[str]]()
    for module, given in inputs.items():
        if isinstance(module, nn.Linear) and is_linear(module) and given and id(module.weight) not in shared:
            parent = names[module].rpartition(".")[0]
            key = (parent, id(given[0])) if len(given) == 1 else (names[module], 0)
            found.setdefault(key, []).append(names[module])
    return tuple(map(tuple, found.values()))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what nn.Linear does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


class LinearGroup:
    """Linear layers that read one input, or a single one. Their weights and biases are views of those of `product` from
    now on. Several are one product in passes over a batch while `used`.
    """

    def __init__(self, linears: Sequence[nn.Linear], method: LinearMethod | None = None) -> None:
        """Take the weights over; with a `method` those that it has, where the layers have none."""
        self.linears = tuple(linears)
        self.used = True
        self.site: Site | None = None
        """Where additions of a batch go; None where none are made."""
        self.sizes = [linear.out_features for linear in linears]
        self.product = _product(self.linears, method)
        self._input: Tensor | None = None
        self._left: dict[int, Tensor] = {}
        for place, linear in enumerate(linears):
            linear.__dict__["forward"] = _Column(self, place, linear)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of the weights, and of biases."""
        return list(self.product.parameters())

    @property
    def plain(self) -> bool:
        """Whether the weights are there, neither packed nor a method's."""
        return not (self.product.packed or self.product.coded)

    def pack(self) -> None:
        """Keep the weights as `toolkit.model.packed` does it, and in no other form: those of the layers are empty."""
        self.product.pack()
        for linear in self.linears:
            linear.weight.set_(linear.weight.new_empty(0).untyped_storage(), 0, (0,), (1,))

    def unpack(self, *, read: bool = True) -> None:
        """Undo `pack`; without `read` the weights have no meaning until they are written."""
        self.product.unpack(read=read)
        for linear, rows in zip(self.linears, torch.split(self.product.weight, self.sizes), strict=True):
            linear.weight.set_(rows.untyped_storage(), int(rows.storage_offset()), rows.shape, rows.stride())

    def whole(self, x: Tensor) -> Tensor:
        """Return the outputs of all layers side by side, [..., sum of sizes], for x [..., in]."""
        out: Tensor = self.product(x)
        if self.site is not None:
            bridge.add_to(self.site, x, out)
        return out

    def column(self, place: int, x: Tensor) -> Tensor:
        """Return the output of one layer. All are computed where x is another tensor than in the last call, or this one
        has had its output for it: what was computed is not handed out twice, since x may have changed in place.
        """
        if x is not self._input or place not in self._left:
            self._left = dict(enumerate(torch.split(self.whole(x), self.sizes, -1)))
            self._input = x
        found = self._left.pop(place)
        if not self._left:
            self._input = None
        return found


class _Column:
    """The `forward` of one of several layers, or of a single one."""

    def __init__(self, group: LinearGroup, place: int, linear: nn.Linear) -> None:
        self._group = group
        self._place = place
        self._linear = linear
        self._single = len(group.linears) == 1

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it
        group = self._group
        if self._single:
            return group.whole(input)
        if group.used and bridge.is_handled():
            return group.column(self._place, input)
        if not group.plain or (group.site is not None and bridge.batch_of_pass() is not None):
            # Each call computes anew: x may have changed. What a batch adds to products goes to the whole.
            return torch.split(group.whole(input), group.sizes, -1)[self._place]
        return F.linear(input, self._linear.weight, self._linear.bias)


def merge(
    model: nn.Module, groups: Iterable[Sequence[str]], coded: CodedLinears | None = None, *, singles: bool = False
) -> list[LinearGroup]:
    """Merge linear layers of `model` by their names. Where only some of a group have a bias, or another type, or are
    `coded`, those are merged that are alike. With `singles` the others are groups of one, and so are coded ones.
    Weights that are used in several places stay as they are.
    """
    shared, codes = _used_twice(model), coded or CodedLinears(())
    found: list[LinearGroup] = []

    def kind(name: str) -> tuple[bool, bool, str, str]:
        weight, bias = _linear(model, name).weight, _linear(model, name).bias
        return name in codes.names, bias is None, str(weight.dtype), str(weight.device)

    for names in groups:
        own = [name for name in names if id(_linear(model, name).weight) not in shared]
        for (is_coded, *_), alike in groupby(sorted(own, key=kind), key=kind):
            group = list(alike)
            linears = [_linear(model, name) for name in group]
            if is_coded:
                found.append(LinearGroup(linears, codes.method(len(found), group, linears)))
            elif len(group) > 1 or singles:
                found.append(LinearGroup(linears))
    return found


class CodedLinears:
    """Linear layers by their `names` whose weights are quantised and stay in the checkpoint's codes: they have none of
    their own. `weights` makes products of them.
    """

    def __init__(self, names: Collection[str], weights: QuantizedWeights | None = None) -> None:
        self.names = frozenset(names)
        self._weights = weights

    def method(self, number: int, names: Sequence[str], linears: Sequence[nn.Linear]) -> LinearMethod:
        """Return the product of some of them. Raises ModelError."""
        assert self._weights is not None
        parts = tuple(Part(name, linear.out_features) for name, linear in zip(names, linears, strict=True))
        site = Site(number, parts, linears[0].in_features)
        return self._weights.linear(site, [f"{name}.weight" for name in names], linears[0].weight.device)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _used_twice(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have several names."""
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {number for number, count in counts.items() if count > 1}


def _product(linears: Sequence[nn.Linear], method: LinearMethod | None) -> FusedLinear:
    """Return one layer with the weights and biases of all, and make the layers' own ones views of it. Those of a single
    layer stay where they are.
    """
    first, sizes, single = linears[0], [linear.out_features for linear in linears], len(linears) == 1
    dtype, device, biased = first.weight.dtype, first.weight.device, first.bias is not None
    coded = method is not None or single
    made = FusedLinear(first.in_features, sizes, bias=biased, dtype=dtype, device=device, coded=coded)
    if method is not None:
        made.use(method)
    elif single:
        made.weight = nn.Parameter(first.weight, requires_grad=False)
    else:
        for linear, rows in zip(linears, torch.split(made.weight, sizes), strict=True):
            linear.weight = _moved(linear.weight, rows)
    if made.bias is not None:
        for linear, rows in zip(linears, torch.split(made.bias, sizes), strict=True):
            linear.bias = _moved(linear.bias, rows)
    return made


def _moved(parameter: Tensor, place: Tensor) -> nn.Parameter:
    """Return a parameter at another place, with the same numbers."""
    place.copy_(parameter.detach())
    return nn.Parameter(place, requires_grad=False)
