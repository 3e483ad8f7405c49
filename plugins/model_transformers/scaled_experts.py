"""Mixtures whose scores scale what goes into the experts, known by what they compute: Llama 4's.

Their own code runs all experts over all tokens, with rows of zeros for those that the router has not chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from pegboard.plugins.model_transformers.known import copied, equal, small_linear
from pegboard.toolkit.kernels.experts import combined, grouped, product, why_it_waits

_HIDDEN, _WIDTH = 12, 8
"""Sizes with which a mixture is tried: rows of 16 bytes, which torch's grouped product needs."""


class _Experts(Protocol):
    """Matrices gate_up_proj [experts, hidden, 2 * width] and down_proj [experts, width, hidden]."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def act_fn(self, gate: Tensor) -> Tensor: ...


class _ScaledMoe(Protocol):
    """A mixture whose `router` returns scores [tokens, experts], 0 for what is not chosen, and its logits."""

    top_k: int
    experts: _Experts

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...
    def router(self, hidden: Tensor) -> tuple[Tensor, Tensor]: ...
    def shared_expert(self, hidden: Tensor) -> Tensor: ...


def take_scaled_experts(model: nn.Module, when: Callable[[], bool]) -> None:
    """Have the experts that a token's router has chosen compute it, and no others, where `when` is true at the call."""
    for module in model.modules():
        parts: object = module
        if _looks_scaled(parts) and _computes_scaled(module):
            vars(module)["forward"] = _ScaledExperts(parts, parts.forward, when)


def why_scaled_wait(module: nn.Module) -> str | None:
    """Return None, or why the host waits for the device in a module of which `take_scaled_experts` has taken hold."""
    forward = vars(module).get("forward")
    return forward.why_it_waits() if isinstance(forward, _ScaledExperts) else None


class _ScaledExperts:
    """The `forward` of one such module."""

    def __init__(
        self, module: _ScaledMoe, forward: Callable[[Tensor], tuple[Tensor, Tensor]], when: Callable[[], bool]
    ) -> None:
        self._module, self._forward, self._when = module, forward, when

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, hidden], and the router's logits."""
        if not self._when():
            return self._forward(hidden_states)
        module, experts = self._module, self._module.experts
        hidden = hidden_states.reshape(-1, experts.gate_up_proj.shape[1])
        scores, logits = module.router(hidden)
        scores, chosen = scores.topk(module.top_k, -1)
        groups = grouped(chosen.int(), len(experts.gate_up_proj))
        scale = torch.empty_like(scores).view(-1).index_copy_(0, groups.places.view(-1).long(), scores.view(-1))
        both = product(hidden, experts.gate_up_proj.transpose(1, 2), None, groups, gather=True) * scale[:, None]
        gate, up = both.chunk(2, -1)
        out = product(up * experts.act_fn(gate), experts.down_proj.transpose(1, 2), None, groups, gather=False)
        routed = combined(out, torch.ones_like(scores, dtype=torch.float32), groups).to(hidden.dtype)
        return module.shared_expert(hidden) + routed, logits

    def why_it_waits(self) -> str | None:
        experts = self._module.experts
        reasons = [why_it_waits(weights.transpose(1, 2)) for weights in (experts.gate_up_proj, experts.down_proj)]
        return next((why for why in reasons if why is not None), None)


def _looks_scaled(module: object) -> TypeGuard[_ScaledMoe]:
    """Return whether a module has the parts of such a mixture, in the shapes that they have."""
    if not isinstance(module, nn.Module) or "forward" in vars(module):
        return False
    children = dict(module.named_children())
    router, experts = children.get("router"), children.get("experts")
    if set(children) != {"router", "experts", "shared_expert"} or not hasattr(experts, "act_fn"):
        return False
    if not isinstance(router, nn.Linear) or len(list(router.parameters())) != 1:
        return False
    weights = dict(experts.named_parameters()) if experts is not None else {}
    if set(weights) != {"gate_up_proj", "down_proj"} or not isinstance(getattr(module, "top_k", None), int):
        return False
    up, down = (tuple(weights[name].shape) for name in ("gate_up_proj", "down_proj"))
    return len(up) == len(down) == 3 and up == (router.out_features, router.in_features, 2 * down[1])


def _computes_scaled(module: nn.Module) -> bool:
    """Return whether a module computes what `_ScaledExperts` does, with small random weights in place of its own."""
    draw = torch.Generator().manual_seed(0)
    children = dict(module.named_children())
    count, hidden, width = children["experts"].get_parameter("down_proj").permute(0, 2, 1).shape
    sizes = {hidden: _HIDDEN, width: _WIDTH if width != hidden else _HIDDEN}
    inside = sizes[width]
    tried, experts, router = (copied(part) for part in (module, children["experts"], children["router"]))
    for part in (tried, experts, router):
        vars(part).update({name: sizes.get(value, value) for name, value in vars(part).items() if type(value) is int})
    router._parameters = {"weight": _drawn((count, _HIDDEN), draw), "bias": None}
    experts._parameters = {
        "gate_up_proj": _drawn((count, _HIDDEN, 2 * inside), draw),
        "down_proj": _drawn((count, inside, _HIDDEN), draw),
    }
    tried._modules = {"router": router, "experts": experts, "shared_expert": small_linear(_HIDDEN, _HIDDEN, draw)}
    # Some are so large that limits show.
    x = torch.randn(1, 6, _HIDDEN, generator=draw) * torch.tensor([1.0, 1e3]).repeat(3)[:, None]
    found: object = tried
    assert _looks_scaled(found)
    try:
        with torch.inference_mode(False), torch.no_grad():
            own, ours = found.forward(x), _ScaledExperts(found, found.forward, lambda: True)(x)
        return all(equal(*pair) for pair in zip(own, ours, strict=True))
    except Exception:  # whatever code raises that is given other sizes than its own
        return False


def _drawn(shape: tuple[int, ...], draw: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=draw), requires_grad=False)
