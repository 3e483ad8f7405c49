"""Gated MLPs in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.toolkit.kernels import operations
from pegboard.toolkit.model.layers import Linears, activation
from pegboard.toolkit.model.weights import Target

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import Additions


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product (Shazeer 2020). [tokens, hidden] -> [tokens, hidden].

    The linear layers of an MLP called `name` are made by `linears`.
    """

    def __init__(self, name: str, hidden: int, intermediate: int, act: str, linears: Linears, *, bias: bool) -> None:
        super().__init__()
        self.act = activation(act)
        self._silu = self.act is F.silu
        gate_up = {f"{name}.gate_proj": intermediate, f"{name}.up_proj": intermediate}
        self.gate_up = linears(hidden, gate_up, bias=bias, split="out")
        self.down = linears(intermediate, {f"{name}.down_proj": hidden}, bias=bias, split="in")

    def forward(self, x: Tensor, additions: Additions | None = None) -> Tensor:
        both = self.gate_up(x, additions)
        if self._silu and operations.takes(both):
            hidden = operations.silu_mul(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            hidden = self.act(gate) * up
        out: Tensor = self.down(hidden, additions)
        return out

    def pack(self) -> None:
        """See `FusedLinear.pack`."""
        self.gate_up.pack()
        self.down.pack()

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for an MLP called `name`."""
        return {
            **self.gate_up.targets((f"{name}.gate_proj", f"{name}.up_proj")),
            **self.down.targets((f"{name}.down_proj",)),
        }
