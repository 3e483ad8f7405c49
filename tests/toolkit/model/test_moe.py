"""Experts against a plain statement in float64, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pegboard.conformance.rig.no_looks import NoLooks
from pegboard.toolkit.model.layers import Linears
from pegboard.toolkit.model.moe import MixtureOfExperts
from pegboard.toolkit.model.moe_spec import MoeSpec

HIDDEN, INTER = 24, 10


def moe(
    experts: int, per_token: int, *, normalised: bool = True, dtype: torch.dtype = torch.float32
) -> MixtureOfExperts:
    spec = MoeSpec(experts, per_token, INTER, normalised, (True,))
    layer = MixtureOfExperts("mlp", spec, HIDDEN, "silu", Linears(dtype, torch.device("cpu")))
    draw = torch.Generator().manual_seed(experts)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    return layer


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


def plainly(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """float64 [tokens, hidden]."""
    rows = []
    for token in x.double():
        shares = (layer.router.double() @ token).softmax(-1)
        chosen = sorted(range(len(shares)), key=lambda e: (-float(shares[e]), e))[: layer.spec.per_token]
        whole = sum(float(shares[e]) for e in chosen) if layer.spec.normalised else 1.0
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in chosen:
            gate, up = (layer.gate_up.weight[e].double() @ token).chunk(2)
            row += shares[e] / whole * (layer.down.weight[e].double() @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, HIDDEN, dtype=torch.float64)


@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (4, 2), (7, 7), (40, 3)])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_equals_the_plain_statement(experts: int, per_token: int, normalised: bool, count: int) -> None:
    layer, x = moe(experts, per_token, normalised=normalised), tokens(count)
    torch.testing.assert_close(layer(x).double(), plainly(layer, x), rtol=1e-5, atol=1e-5)


def test_all_tokens_to_the_same_experts() -> None:
    layer, x = moe(9, 2), tokens(20).abs()
    layer.router[[5, 3]] += 3.0
    assert int((F.linear(x, layer.router).topk(2).indices.sort().values != torch.tensor([3, 5])).sum()) == 0
    torch.testing.assert_close(layer(x).double(), plainly(layer, x), rtol=1e-5, atol=1e-4)


def test_other_experts_are_not_looked_at() -> None:
    """What is not finite in them goes nowhere."""
    layer, x = moe(6, 2), tokens(3)
    expected = layer(x)
    used = set(F.linear(x, layer.router).topk(2).indices.flatten().tolist())
    assert len(used) < 6
    for expert in set(range(6)) - used:
        layer.gate_up.weight[expert], layer.down.weight[expert] = torch.nan, torch.inf
    assert torch.equal(layer(x), expected)


def test_of_equal_experts_the_first_are_taken() -> None:
    layer, x = moe(40, 3), tokens(5)
    layer.router.zero_()
    layer.gate_up.weight[3:] = torch.nan
    assert bool(layer(x).isfinite().all())


def test_the_router_sees_more_than_half_precision_does() -> None:
    """Two experts whose shares bfloat16 cannot tell apart."""
    layer = moe(2, 1, dtype=torch.bfloat16)
    layer.router[0], layer.router[1] = 1.0, 1.0 + 2.0**-12
    layer.gate_up.weight[0] = torch.nan
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    assert bool(found.isfinite().all()), "the second one is larger"


def test_a_token_gets_the_same_whoever_stands_beside_it() -> None:
    """Its experts are added in the router's order. Products of other shapes may sum in another order: 24 terms."""
    layer, x = moe(9, 3), tokens(12)
    together = layer(x)
    for token in range(12):
        torch.testing.assert_close(layer(x[token : token + 1]), together[token : token + 1], rtol=3e-6, atol=3e-6)


def test_the_host_waits_where_rows_have_odd_sizes() -> None:
    """10 numbers of 2 bytes are no multiple of 16 bytes, and so torch has no grouped product of them."""
    assert "16 bytes" in str(moe(4, 2).why_it_waits())
    spec = MoeSpec(4, 2, 16, True, (True,))
    layer = MixtureOfExperts("mlp", spec, HIDDEN, "silu", Linears(torch.float32, torch.device("cpu")))
    assert layer.why_it_waits() is None
    layer.router.normal_()
    with NoLooks(torch.device("cpu")):
        layer(tokens(5))
