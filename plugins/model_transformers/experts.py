"""Experts of transformers' models by our products of pairs, in kernels where those are used, and without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch

from pegboard.toolkit.kernels.experts import combined, grouped, product

EXPERTS = "pegboard_pairs"
"""The implementation of experts in a served model."""


class _Experts(Protocol):
    """What transformers makes of a module of experts: how its weights lie, and those of them that it has: a matrix
    [experts, outputs, inputs] each, or `is_transposed`, and biases [experts, outputs].
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    gate_up_proj: torch.Tensor
    up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    up_proj_bias: torch.Tensor
    down_proj_bias: torch.Tensor

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor: ...
    def act_fn(self, up: torch.Tensor) -> torch.Tensor: ...
    def post_expert_norm(self, out: torch.Tensor) -> torch.Tensor: ...


def register() -> None:
    """Make the implementation known to transformers. Calling it again changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _forward)


def _forward(
    module: _Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts [tokens, hidden], of their numbers and weights [tokens, k]."""
    up, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    groups = grouped(top_k_index.int(), module.num_experts)
    both = product(hidden_states.to(up.dtype), up, up_bias, groups, gather=True)
    inside = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    out = product(inside.to(down.dtype), down, down_bias, groups, gather=False)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return combined(out, top_k_weights.float(), groups).to(hidden_states.dtype)


class _ScaledMoe(Protocol):
    """Llama 4's mixture: the scores scale what goes into the experts, gate_up_proj [experts, hidden, 2 * width] and
    down_proj [experts, width, hidden], and not what comes out. The module itself runs all experts over all tokens.
    """

    top_k: int
    num_experts: int
    hidden_dim: int
    experts: _Experts

    def router(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def shared_expert(self, hidden: torch.Tensor) -> torch.Tensor: ...


def take_scaled_experts(model: torch.nn.Module, when: Callable[[], bool]) -> None:
    """Have the experts of Llama 4 that a token's router has chosen compute it, and no others, where `when` is true at
    the call.
    """
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            module.__dict__["forward"] = _ScaledExperts(cast(_ScaledMoe, module), module.forward, when)


class _ScaledExperts:
    """The `forward` of one such module."""

    def __init__(
        self,
        module: _ScaledMoe,
        forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        when: Callable[[], bool],
    ) -> None:
        self._module, self._forward, self._when = module, forward, when

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [tokens, hidden], and the router's logits."""
        if not self._when():
            return self._forward(hidden_states)
        module, experts = self._module, self._module.experts
        hidden = hidden_states.reshape(-1, module.hidden_dim)
        scores, logits = module.router(hidden)
        scores, chosen = scores.topk(module.top_k, -1)
        groups = grouped(chosen.int(), module.num_experts)
        scale = torch.empty_like(scores).view(-1).index_copy_(0, groups.places.view(-1).long(), scores.view(-1))
        both = product(hidden, experts.gate_up_proj.transpose(1, 2), None, groups, gather=True) * scale[:, None]
        gate, up = both.chunk(2, -1)
        out = product(up * experts.act_fn(gate), experts.down_proj.transpose(1, 2), None, groups, gather=False)
        routed = combined(out, torch.ones_like(scores, dtype=torch.float32), groups).to(hidden.dtype)
        return module.shared_expert(hidden) + routed, logits
