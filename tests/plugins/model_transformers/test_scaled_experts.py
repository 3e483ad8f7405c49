"""Mixtures whose scores scale what goes into the experts: those are taken that compute this, whatever their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from pegboard.plugins.model_transformers.scaled_experts import take_scaled_experts

HIDDEN = 24
Outputs = tuple[Tensor, Tensor]


def scales_what_comes_out(self: Any, hidden_states: Tensor) -> Outputs:
    hidden = hidden_states.reshape(-1, HIDDEN)
    scores, logits = self.router(hidden)
    out = self.experts(hidden.repeat(scores.shape[1], 1)).reshape(scores.shape[1], -1, hidden.shape[1])
    return self.shared_expert(hidden) + (out * scores.t()[..., None]).sum(0), logits


def clamps(self: Any, hidden_states: Tensor) -> Outputs:
    """Only what is large."""
    out, logits = Llama4TextMoe.forward(self, hidden_states.clamp(-50, 50))
    return out, logits


def has_no_shared(self: Any, hidden_states: Tensor) -> Outputs:
    out, logits = Llama4TextMoe.forward(self, hidden_states)
    return out - self.shared_expert(hidden_states.reshape(-1, hidden_states.shape[-1])), logits


def mixture(kind: type[Any] = Llama4TextMoe, chosen: int = 2) -> Any:
    config = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=40, num_local_experts=4, num_experts_per_tok=chosen)
    made = kind(config).requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2)
    return made


@pytest.mark.parametrize("name", ["Llama4TextMoe", "OfAnotherName"])
@pytest.mark.parametrize("chosen", [1, 3])
def test_chosen_experts_alone_give_what_all_give(name: str, chosen: int) -> None:
    """In float32, whose sums differ in their order: relative 1e-5 of the largest number."""
    module = mixture(type(name, (Llama4TextMoe,), {}), chosen)
    x = torch.randn(1, 11, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, logits = module(x)
    calls: list[object] = []
    take_scaled_experts(module, lambda: True)
    module.experts.register_forward_hook(lambda *called: calls.append(called[-1]))
    found, same = module(x)
    assert not calls, "the experts' own code, which runs all of them"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(same, logits)


def test_the_model_computes_by_its_own_code_otherwise() -> None:
    module, calls = mixture(), list[object]()
    take_scaled_experts(module, lambda: False)
    module.experts.register_forward_hook(lambda *called: calls.append(called[-1]))
    module(torch.ones(1, 2, HIDDEN))
    assert len(calls) == 1


@pytest.mark.parametrize("forward", [scales_what_comes_out, clamps, has_no_shared])
def test_what_computes_something_else_stays(forward: Callable[..., Outputs]) -> None:
    module = mixture(type("Llama4TextMoe", (Llama4TextMoe,), {"forward": forward}))
    take_scaled_experts(module, lambda: True)
    assert "forward" not in vars(module)


def without_act(module: Any) -> None:
    del module.experts.act_fn


def with_a_bias(module: Any) -> None:
    module.router.bias = nn.Parameter(torch.zeros(4), requires_grad=False)


@pytest.mark.parametrize("change", [without_act, with_a_bias])
def test_what_has_other_parts_stays(change: Callable[[Any], None]) -> None:
    module = mixture()
    change(module)
    take_scaled_experts(module, lambda: True)
    assert "forward" not in vars(module)
