"""Experts of transformers' models by our products of pairs, in kernels where those are used, and without a wait."""

from __future__ import annotations

from typing import Protocol

import torch

from pegboard.toolkit.kernels.experts import combined, grouped, product

EXPERTS = "pegboard_pairs"
"""The implementation of experts in a served model."""


class _Experts(Protocol):
    """What transformers makes of a module of experts: sizes, and how its weights lie."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool

    def get_parameter(self, target: str) -> torch.nn.Parameter: ...

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
    up, up_bias = _weights(module, "gate_up_proj" if module.has_gate else "up_proj")
    down, down_bias = _weights(module, "down_proj")
    groups = grouped(top_k_index.int(), module.num_experts)
    both = product(hidden_states.to(up.dtype), up, up_bias, groups, gather=True)
    inside = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    out = product(inside.to(down.dtype), down, down_bias, groups, gather=False)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return combined(out, top_k_weights.float(), groups).to(hidden_states.dtype)


def _weights(module: _Experts, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a matrix per expert [experts, outputs, inputs], in whatever strides, and biases [experts, outputs]."""
    weights = module.get_parameter(name)
    bias = module.get_parameter(f"{name}_bias") if module.has_bias else None
    return weights.transpose(1, 2) if module.is_transposed else weights, bias
