"""Experts of transformers' models by our products of pairs, in kernels where those are used, and without a wait."""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch

from pegboard.toolkit.kernels.experts import combined, grouped, product, why_it_waits

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


def waiting_experts(model: torch.nn.Module) -> str | None:
    """Return None, or why the host waits for the device in the first module of experts for which it does."""
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        reason = next((why for weights in _weights(module) if (why := why_it_waits(weights)) is not None), None)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def is_experts(module: object) -> TypeGuard[_Experts]:
    """Return whether a module's experts can be computed by an implementation that transformers is given."""
    return hasattr(module, "has_post_expert_norm")


def _weights(module: _Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of both products, each [experts, outputs, inputs]."""
    up, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    return (up.transpose(1, 2), down.transpose(1, 2)) if module.is_transposed else (up, down)


def _forward(
    module: _Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts [tokens, hidden], of their numbers and weights [tokens, k]."""
    up, down = _weights(module)
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
