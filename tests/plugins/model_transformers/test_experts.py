"""Our products of experts in modules of transformers, beside its own loop over them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers

from pegboard.plugins.model_transformers.experts import EXPERTS, register
from pegboard.toolkit import kernels
from pegboard.toolkit.kernels.launch import Launch, observed
from tests.tools.family_configs import FAMILIES

NAMES = ("mixtral", "gpt_oss", "glm4_moe", "minimax_m2", "nemotron_h")
"""gpt-oss has biases, and weights the other way round with gate and up in turn; Nemotron has no gate."""


def experts_of(name: str, implementation: str) -> torch.nn.Module:
    """Return random experts of a model: its first module of such."""
    family = FAMILIES[name]
    fields = {**family.fields, "hybrid_override_pattern": "EEE*"} if name == "nemotron_h" else family.fields
    config = getattr(transformers, f"{family.prefix}Config")(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    found = next(one for one in model.modules() if hasattr(one, "has_post_expert_norm"))
    found = found.to_empty(device="cpu").requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for weight in found.parameters():
        weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "kernels"])
def test_experts_are_those_of_transformers(name: str, fused: bool, request: pytest.FixtureRequest) -> None:
    """In float32, whose sums differ in their order: relative 1e-5 of the largest number."""
    if fused:
        request.getfixturevalue("interpreted_triton")
    register()
    theirs, ours = experts_of(name, "eager"), experts_of(name, EXPERTS)
    count = next(one.shape[0] for one in theirs.parameters() if one.dim() == 3)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, FAMILIES[name].fields["hidden_size"], generator=draw)
    weights, chosen = torch.randn(11, count, generator=draw).softmax(-1).topk(2)
    expected = theirs(hidden, chosen, weights)
    launched: list[str] = []

    def note(launch: Launch) -> bool:
        launched.append(str(getattr(launch.kernel, "__name__", "")))
        return True

    with kernels.allowed("cpu") if fused else nullcontext(), observed(note):
        found = ours(hidden, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert launched.count("product_kernel") == (2 if fused else 0)
