"""Mixture-of-experts layers in torch: every expert computes the tokens that were sent to it. Ranks share each expert as
they share an MLP: gate and up by rows, down by columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.toolkit.model.layers import FusedLinear, Linears, activation, empty_parameter
from pegboard.toolkit.model.moe_spec import MoeSpec
from pegboard.toolkit.model.ranks import Ranks
from pegboard.toolkit.model.weights import Slice, Target

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import Additions


class MixtureOfExperts(nn.Module):
    """The weighted sum of each token's best experts, [tokens, hidden] -> [tokens, hidden].

    An expert is down(act(gate(x)) * up(x)). Router, weights and sums are float32, and a token's experts are added in
    the order of their numbers, so that what it gets does not depend on the tokens beside it. Of experts that the router
    finds equal the first is taken.
    """

    def __init__(
        self,
        spec: MoeSpec,
        hidden: int,
        act: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.act = activation(act)
        self.ranks = ranks or Ranks()
        self.cut = self.ranks.cut(spec.intermediate_size)
        experts, inter = spec.num_experts, self.cut.length
        self.router = empty_parameter(experts, hidden, dtype=torch.float32, device=device)
        self.gate_up = empty_parameter(experts, 2 * inter, hidden, dtype=dtype, device=device)
        self.down = empty_parameter(experts, hidden, inter, dtype=dtype, device=device)

    def forward(self, x: Tensor, additions: Additions | None = None) -> Tensor:
        """Return the sum. Nothing is added to the products of experts."""
        weights, experts = self._route(x)
        # Sorted by expert, and in the order of the tokens within one.
        order = experts.argsort(stable=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in enumerate(torch.bincount(experts, minlength=self.spec.num_experts).tolist()):
            if count:
                pairs = order[start : start + count]
                tokens = pairs // self.spec.per_token
                out.index_add_(0, tokens, self._expert(x[tokens], expert).float() * weights[pairs, None])
            start += count
        return self.ranks.all_reduce(out).to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights float32 and experts int64, both [tokens * per_token], token after token."""
        shares = F.linear(x.float(), self.router).softmax(-1)
        best, experts = shares.sort(dim=-1, descending=True, stable=True)
        best, experts = best[:, : self.spec.per_token], experts[:, : self.spec.per_token]
        if self.spec.normalised:
            best = best / best.sum(-1, keepdim=True)
        return best.flatten(), experts.flatten()

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        return F.linear(self.act(gate) * up, self.down[expert])

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
            f"{name}.experts.gate_up_proj": self.gate_up,
            f"{name}.experts.down_proj": self.down,
        }

    def _shares(self, name: str) -> dict[str, Target]:
        found: dict[str, Target] = {}
        start, count, full = self.cut
        for names, both, down in zip(expert_names(name, self.spec), self.gate_up, self.down, strict=True):
            gate, up, narrow = (f"{part}.weight" for part in names)
            hidden = down.shape[0]
            found[gate] = Slice(both[:count], 0, start, (full, hidden))
            found[up] = Slice(both[count:], 0, start, (full, hidden))
            found[narrow] = Slice(down, 1, start, (hidden, full))
        return found


class CodedExperts(MixtureOfExperts):
    """A mixture whose experts are sites of `linears`, two each: quantised weights can stay codes.

    Its checkpoint has experts one by one, called `name`.experts.0.gate_proj and so on.
    """

    def __init__(self, name: str, spec: MoeSpec, hidden: int, act: str, linears: Linears) -> None:
        super().__init__(spec, hidden, act, dtype=linears.dtype, device=torch.device("meta"))
        del self.gate_up, self.down
        self.router = empty_parameter(spec.num_experts, hidden, dtype=torch.float32, device=linears.device)
        inter, experts = spec.intermediate_size, expert_names(name, spec)
        self.gate_ups = nn.ModuleList(
            linears(hidden, {gate: inter, up: inter}, bias=False, expert=True) for gate, up, _ in experts
        )
        self.downs = nn.ModuleList(linears(inter, {down: hidden}, bias=False, expert=True) for *_, down in experts)

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        gate, up = self.gate_ups[expert](x).chunk(2, dim=-1)
        out: Tensor = self.downs[expert](self.act(gate) * up)
        return out

    def targets(self, name: str) -> dict[str, Target]:
        found: dict[str, Target] = {f"{name}.gate.weight": self.router}
        for gate_up, down, parts in zip(self.gate_ups, self.downs, expert_names(name, self.spec), strict=True):
            assert isinstance(gate_up, FusedLinear)
            assert isinstance(down, FusedLinear)
            found |= gate_up.targets(parts[:2]) | down.targets(parts[2:])
        return found


def expert_names(name: str, spec: MoeSpec) -> list[tuple[str, str, str]]:
    """Return the names of the gate, up and down projections of each expert of a mixture called `name`."""
    experts = [f"{name}.experts.{number}" for number in range(spec.num_experts)]
    return [(f"{one}.gate_proj", f"{one}.up_proj", f"{one}.down_proj") for one in experts]


def mixture(name: str, spec: MoeSpec, hidden: int, act: str, linears: Linears) -> MixtureOfExperts:
    """Return the mixture called `name`: of coded experts where the checkpoint has such one by one."""
    if linears.coded(part for parts in expert_names(name, spec) for part in parts):
        return CodedExperts(name, spec, hidden, act, linears)
    return MixtureOfExperts(spec, hidden, act, dtype=linears.dtype, device=linears.device, ranks=linears.ranks)
