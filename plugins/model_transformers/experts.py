"""Experts of transformers' models by our products of pairs, in kernels where those are used, and without a wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeGuard

import torch

from pegboard.toolkit.kernels.experts import Groups, combined, grouped, product, why_it_waits
from pegboard.toolkit.model.experts import ExpertsMethod
from pegboard.toolkit.model.linear import Part, Site

if TYPE_CHECKING:
    from pegboard.toolkit.model.coded import CodedMatrix, QuantizedWeights

EXPERTS = "pegboard_pairs"
"""The implementation of experts in a served model."""


class ExpertsModule(Protocol):
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


class ExpertsCodes(NamedTuple):
    """Both products of a module of experts whose weights are quantised and stay in the checkpoint's codes."""

    up: ExpertsMethod
    down: ExpertsMethod


_CODES = "pegboard_codes"
"""Where a module has its `ExpertsCodes`."""


def keep_codes(name: str, module: ExpertsModule, weights: QuantizedWeights, device: torch.device) -> None:
    """Have a module multiply by the codes of its weights on a device; its own weights become empty."""
    up, down = _weights(module)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    methods = []
    for part, plain in ((first, up), ("down_proj", down)):
        count, rows, cols = plain.shape
        site = Site(0, (Part(f"{name}.{part}", rows),), cols, count)
        methods.append(weights.stacked_experts(site, f"{name}.{part}", device))
        setattr(module, part, torch.nn.Parameter(torch.empty(0, dtype=plain.dtype), requires_grad=False))
    vars(module)[_CODES] = ExpertsCodes(*methods)


def keeps_codes(module: object) -> bool:
    """Return whether `keep_codes` was called for a module."""
    return _CODES in vars(module)


def fits_codes(name: str, module: ExpertsModule, matrices: Mapping[str, CodedMatrix]) -> bool:
    """Return whether the weights of a module of experts are quantised, and a matrix of the codes has an expert's
    outputs for rows.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for part, plain in zip((first, "down_proj"), _weights(module), strict=True):
        count, rows, cols = plain.shape
        matrix = matrices.get(f"{name}.{part}")
        if matrix is None or matrix.shape != ((count, cols, rows) if module.is_transposed else (count, rows, cols)):
            return False
        arranged = matrix.arrange(torch.empty(count * rows, cols, device="meta"))
        if (arranged.stride(-1) != 1) != module.is_transposed:
            return False
    return True


def _forward(
    module: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts [tokens, hidden], of their numbers and weights [tokens, k]."""
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    groups = grouped(top_k_index.int(), module.num_experts)
    both = _product(module, 0, hidden_states, up_bias, groups)
    inside = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    out = _product(module, 1, inside, down_bias, groups)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return combined(out, top_k_weights.float(), groups).to(hidden_states.dtype)


def _product(
    module: ExpertsModule, which: Literal[0, 1], x: torch.Tensor, bias: torch.Tensor | None, groups: Groups
) -> torch.Tensor:
    """Return the first or the second product of each position, [pairs, outputs]; x has a row for each token first, and
    then for each position.
    """
    codes: ExpertsCodes | None = vars(module).get(_CODES)
    if codes is None:
        weights = _weights(module)[which]
        return product(x.to(weights.dtype), weights, bias, groups, gather=which == 0)
    out = codes[which].apply(x, groups, gather=which == 0)
    return out if bias is None else out + bias.index_select(0, groups.expert_of_position())


def why_experts_wait(module: ExpertsModule) -> str | None:
    """Return None, or why the host waits for the device in a product of a module of experts."""
    codes: ExpertsCodes | None = vars(module).get(_CODES)
    if codes is not None:
        reasons = [method.why_it_waits() for method in codes]
    else:
        reasons = [why_it_waits(weights) for weights in _weights(module)]
    return next((why for why in reasons if why is not None), None)


def is_experts(module: object) -> TypeGuard[ExpertsModule]:
    """Return whether a module's experts can be computed by an implementation that transformers is given."""
    return hasattr(module, "has_post_expert_norm")


def _weights(module: ExpertsModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of both products, each [experts, outputs, inputs]."""
    up, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    return (up.transpose(1, 2), down.transpose(1, 2)) if module.is_transposed else (up, down)
