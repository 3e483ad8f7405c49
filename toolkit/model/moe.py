"""Mixture-of-experts layers in torch: every expert computes the tokens that were sent to it. Ranks share each expert as
they share an MLP: gate and up by rows, down by columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.toolkit.kernels import operations
from pegboard.toolkit.kernels.experts import combined, grouped, route
from pegboard.toolkit.model.layers import Linears, activation, empty_parameter
from pegboard.toolkit.model.moe_spec import MoeSpec
from pegboard.toolkit.model.weights import Slice, Target

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import Additions


class MixtureOfExperts(nn.Module):
    """The weighted sum of each token's best experts, [tokens, hidden] -> [tokens, hidden].

    An expert is down(act(gate(x)) * up(x)). Router, weights and sums are float32, and a token's experts are added in
    the router's order, so that what it gets does not depend on the tokens beside it. Of experts that the router finds
    equal the first is taken. The host does not wait for the device, unless `why_it_waits` says so.

    Its matrices are made by `linears`; the checkpoint may have experts together or one by one, called
    `name`.experts.0.gate_proj and so on.
    """

    def __init__(self, name: str, spec: MoeSpec, hidden: int, act: str, linears: Linears) -> None:
        super().__init__()
        self.spec = spec
        self.act = activation(act)
        self._silu = self.act is F.silu
        self.ranks = linears.ranks
        self.cut = self.ranks.cut(spec.intermediate_size)
        experts, inter = spec.num_experts, self.cut.length
        self.router = empty_parameter(experts, hidden, dtype=torch.float32, device=linears.device)
        base = f"{name}.experts.*"
        self.gate_up = linears.experts(experts, hidden, {f"{base}.gate_proj": inter, f"{base}.up_proj": inter})
        self.down = linears.experts(experts, inter, {f"{base}.down_proj": hidden})

    def forward(self, x: Tensor, additions: Additions | None = None) -> Tensor:
        """Return the sum. Nothing is added to the products of experts."""
        logits = F.linear(x.float(), self.router)
        weights, experts = route(logits, self.spec.per_token, normalised=self.spec.normalised)
        groups = grouped(experts, self.spec.num_experts)
        products = self.down(self._gated(self.gate_up(x, groups, gather=True)), groups, gather=False)
        return self.ranks.all_reduce(combined(products, weights, groups))

    def _gated(self, both: Tensor) -> Tensor:
        if self._silu and operations.takes(both):
            return operations.silu_mul(both)
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate) * up

    def why_it_waits(self) -> str | None:
        """Return None, or why the host waits for the device in each pass."""
        return self.gate_up.why_it_waits() or self.down.why_it_waits()

    def pack(self) -> None:
        """Leave the weights as they are: oneDNN would keep every expert's by itself."""

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for experts called `name`: of all together, output sizes before input sizes; where
        ranks share them, of each alone.
        """
        if self.ranks.size > 1:
            return {f"{name}.gate.weight": self.router, **self._shares(name)}
        return {
            f"{name}.gate.weight": self.router,
            f"{name}.experts.gate_up_proj": self.gate_up.weight,
            f"{name}.experts.down_proj": self.down.weight,
        }

    def _shares(self, name: str) -> dict[str, Target]:
        found: dict[str, Target] = {}
        start, count, full = self.cut
        for names, both, down in zip(expert_names(name, self.spec), self.gate_up.weight, self.down.weight, strict=True):
            gate, up, narrow = (f"{part}.weight" for part in names)
            hidden = down.shape[0]
            found[gate] = Slice(both[:count], 0, start, (full, hidden))
            found[up] = Slice(both[count:], 0, start, (full, hidden))
            found[narrow] = Slice(down, 1, start, (hidden, full))
        return found


def expert_names(name: str, spec: MoeSpec) -> list[tuple[str, str, str]]:
    """Return the names of the gate, up and down projections of each expert of a mixture called `name`."""
    experts = [f"{name}.experts.{number}" for number in range(spec.num_experts)]
    return [(f"{one}.gate_proj", f"{one}.up_proj", f"{one}.down_proj") for one in experts]
