"""What a loaded model computes by our operators in place of its own: linear layers in one product, norms, gated MLPs.

In passes over a batch only. In a pass of the model's own attention its modules do what they always do, so that this is
what the others are compared with (see `TransformersFamily.probe`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.experts import ExpertsModule, is_experts
from pegboard.plugins.model_transformers.known import KnownMLP, KnownNorm, known_gate, known_mlp, known_norm
from pegboard.plugins.model_transformers.merged import CodedLinears, LinearGroup, merge
from pegboard.toolkit.kernels import operations
from pegboard.toolkit.model.layers import activation

KINDS = ("linear layers", "norms", "gated MLPs")
"""In the order in which they are replaced."""


class Replaced:
    """The parts of `model` that are replaced, by kind. `groups` are the names of linear layers, in groups of those that
    read one input, and `coded` those whose weights are quantised. If weights are to be packed, `packs`, single ones are
    in the product of a group, too.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[Sequence[str]],
        coded: CodedLinears | None = None,
        *,
        packs: bool = False,
    ) -> None:
        self.groups = merge(model, groups, coded, singles=packs)
        self.packs = packs
        self._norms: list[_Norm] = []
        self._mlps: list[_GatedMLP] = []
        merged: dict[frozenset[nn.Module], LinearGroup] = {frozenset(group.linears): group for group in self.groups}
        self._gates: list[_Gate] = []
        for module in model.modules():
            if is_experts(module) and module.has_gate:
                if (gate := known_gate(module)) is not None:
                    self._gates.append(_Gate(module, gate))
            elif (norm := known_norm(module)) is not None:
                self._norms.append(_Norm(module, norm))
            elif (mlp := known_mlp(module)) is not None:
                self._mlps.append(_GatedMLP(module, mlp, merged))
        several = [group for group in self.groups if len(group.linears) > 1]
        kinds: tuple[Sequence[LinearGroup | _Norm | _GatedMLP | _Gate], ...] = (
            several,
            self._norms,
            [*self._mlps, *self._gates],
        )
        self._kinds = dict(zip(KINDS, kinds, strict=True))

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind are replaced."""
        return {kind: sum(part.used for part in parts) for kind, parts in self._kinds.items()}

    def give_up(self) -> str | None:
        """Have the model compute all of one kind by itself again: of the kind that was replaced last. Return which one,
        None where nothing is replaced.
        """
        kind = next((kind for kind in reversed(KINDS) if self.counts[kind]), None)
        for part in self._kinds.get(kind or "", ()):
            part.used = False
        return kind

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack all weights that are to be; those that are packed stay so."""
        for group in self.groups if self.packs else ():
            if group.plain:
                group.pack()

    @torch.inference_mode()
    def unpack(self) -> None:
        """Undo `pack`."""
        for group in self.groups:
            if group.product.packed:
                group.unpack()


class _Norm:
    """The `forward` of a norm: by a kernel where that takes the input, else by torch's, whose weight has no offset."""

    def __init__(self, module: nn.Module, known: KnownNorm) -> None:
        self.used = True
        self._own = module.forward
        self._module = module
        self._known = known
        module.__dict__["forward"] = self

    def __call__(self, *args: Tensor, **named: Tensor) -> Tensor:
        given = (*args, *named.values())
        if not (self.used and bridge.is_handled() and len(given) == 1):  # some norms take a gate, too
            return _tensor(self._own(*args, **named))
        (x,), known = given, self._known
        weight = self._module.get_parameter(known.weight)
        if x.dtype != weight.dtype:
            return _tensor(self._own(x))
        if not operations.takes(x):
            return _tensor(self._own(x)) if known.offset else F.rms_norm(x, weight.shape, weight, known.eps)
        return operations.rms_norm(x, weight, known.eps, offset=known.offset)


class _Gate:
    """The gate of a module of experts: by a kernel where that takes the input."""

    def __init__(self, module: ExpertsModule, known: operations.SiluGate) -> None:
        self.used = True
        self._own = module._apply_gate
        self._known = known
        vars(module)["_apply_gate"] = self

    def __call__(self, both: Tensor) -> Tensor:
        if self.used and bridge.is_handled() and operations.takes(both):
            return operations.gated_silu(both, self._known)
        return self._own(both)


class _GatedMLP:
    """The `forward` of a gated MLP: gate and up in one product, their activation in one kernel where there is one."""

    def __init__(self, module: nn.Module, known: KnownMLP, merged: dict[frozenset[nn.Module], LinearGroup]) -> None:
        self.used = True
        self._own = module.forward
        self._first, self._down = module.get_submodule(known.gate), module.get_submodule(known.down)
        self.act = activation(known.act)
        self._silu = known.act == "silu"
        self._group: LinearGroup | None = None
        self._swapped = False
        if known.up is not None:
            up = module.get_submodule(known.up)
            self._group = merged.get(frozenset((self._first, up)))
            self._swapped = self._group is not None and self._group.linears[0] is up
            self.used = self._group is not None
        module.__dict__["forward"] = self

    def __call__(self, *args: Tensor, **named: Tensor) -> Tensor:
        given = (*args, *named.values())
        if not (self.used and bridge.is_handled() and len(given) == 1):
            return _tensor(self._own(*args, **named))
        (x,) = given
        both = self._both(x)
        gate, up = both.chunk(2, -1)
        if self._swapped:
            gate, up = up, gate
        if self._silu and operations.takes(both):
            width = gate.shape[-1]
            hidden = operations.silu_mul(gate.view(-1, width), up.view(-1, width)).view(*x.shape[:-1], width)
        else:
            hidden = self.act(gate) * up
        return _tensor(self._down(hidden))

    def _both(self, x: Tensor) -> Tensor:
        """Return the outputs of both layers side by side."""
        if self._group is not None and self._group.used:
            return self._group.whole(x)
        if self._group is None:
            return _tensor(self._first(x))
        return torch.cat([_tensor(linear(x)) for linear in self._group.linears], -1)


def _tensor(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found
