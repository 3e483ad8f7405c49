"""Mixture-of-experts layers in torch, on one device: every expert computes the tokens that were sent to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.toolkit.model.layers import activation, empty_parameter
from pegboard.toolkit.model.moe_spec import MoeSpec


class MixtureOfExperts(nn.Module):
    """The weighted sum of each token's best experts, [tokens, hidden] -> [tokens, hidden].

    An expert is down(act(gate(x)) * up(x)). Router, weights and sums are float32, and a token's experts are added in
    the order of their numbers, so that what it gets does not depend on the tokens beside it. Of experts that the router
    finds equal the first is taken.
    """

    def __init__(self, spec: MoeSpec, hidden: int, act: str, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.act = activation(act)
        experts, inter = spec.num_experts, spec.intermediate_size
        self.router = empty_parameter(experts, hidden, dtype=torch.float32, device=device)
        self.gate_up = empty_parameter(experts, 2 * inter, hidden, dtype=dtype, device=device)
        self.down = empty_parameter(experts, hidden, inter, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
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
        return out.to(x.dtype)

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

    def targets(self, name: str) -> dict[str, Tensor]:
        """Checkpoint name -> buffer, for experts called `name`: of all together, output sizes before input sizes."""
        return {
            f"{name}.gate.weight": self.router,
            f"{name}.experts.gate_up_proj": self.gate_up,
            f"{name}.experts.down_proj": self.down,
        }
