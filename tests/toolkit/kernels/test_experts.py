"""Pairs of tokens and experts in kernels, interpreted, against plain statements in float64."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from pegboard.conformance.rig.no_looks import NoLooks
from pegboard.toolkit.kernels import experts
from pegboard.toolkit.kernels.experts import Groups, combined, grouped, product, route, tiles_of
from pegboard.toolkit.kernels.launch import Launch, observed

SIZES = [(1, 1, 1), (6, 2, 3), (40, 8, 33), (128, 8, 120)]
"""Experts, experts per token, and tokens."""


def logits(count: int, tokens: int) -> Tensor:
    return torch.randn(tokens, count, generator=torch.Generator().manual_seed(count))


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device)


@pytest.mark.parametrize(("count", "per_token", "tokens"), SIZES)
@pytest.mark.parametrize("normalised", [True, False])
def test_routes_are_the_largest_shares(
    count: int, per_token: int, tokens: int, normalised: bool, device: torch.device
) -> None:
    """Five roundings of float32: of the exponential and its argument, a sum, two quotients."""
    found = logits(count, tokens)
    weights, chosen = route(found.to(device), per_token, normalised=normalised)
    best, expected = found.double().softmax(-1).topk(per_token)
    if normalised:
        best = best / best.sum(-1, keepdim=True)
    assert torch.equal(chosen.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu().double(), best, rtol=2e-6, atol=1e-9)


def test_of_equal_experts_the_first_are_taken(device: torch.device) -> None:
    weights, chosen = route(torch.zeros(3, 40, device=device), 3, normalised=True)
    assert chosen.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights.cpu(), torch.full((3, 3), 1 / 3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, which interprets the kernel
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_choose_experts_that_there_are(bad: float, device: torch.device) -> None:
    """Or the products would read beyond the weights."""
    _, chosen = route(torch.full((2, 6), bad, device=device), 2, normalised=True)
    assert bool(((chosen >= 0) & (chosen < 6)).all())


@pytest.mark.parametrize(("count", "per_token", "tokens"), SIZES)
@pytest.mark.parametrize("in_torch", [False, True])
def test_positions_are_in_the_order_of_experts_and_of_tokens(
    count: int, per_token: int, tokens: int, in_torch: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_torch:
        monkeypatch.setattr(experts, "_FEW_PAIRS", 0)
    _, chosen = route(logits(count, tokens), per_token, normalised=True)
    groups = grouped(chosen.to(device), count)
    pairs = sorted((expert, token) for token, row in enumerate(chosen.tolist()) for expert in row)
    assert groups.rows.tolist() == [token for _, token in pairs]
    of = [expert for expert, _ in pairs]
    assert groups.offsets.tolist() == [sum(one <= expert for one in of) for expert in range(count)]
    assert groups.expert_of_position().tolist() == of
    for token, row in enumerate(chosen.tolist()):
        assert [pairs[place] for place in groups.places[token].tolist()] == [(expert, token) for expert in row]


def covered(groups: Groups, tiles: Tensor) -> list[int]:
    """Return the positions of all tiles, which are each of one expert."""
    found: list[int] = []
    of = groups.expert_of_position().tolist()
    for expert, begin, end in tiles.tolist():
        if expert >= 0:
            some = range(begin, min(begin + groups.tile, end))
            assert some
            assert {of[place] for place in some} == {expert}
            found += some
    return found


@pytest.mark.parametrize(("count", "per_token", "tokens"), [*SIZES, (3, 2, 200)])
def test_tiles_cover_each_position_once(count: int, per_token: int, tokens: int, device: torch.device) -> None:
    _, chosen = route(logits(count, tokens), per_token, normalised=True)
    groups = grouped(chosen.to(device), count)
    assert groups.tiles is not None
    for tiles in (groups.tiles, tiles_of(groups)):
        assert covered(groups, tiles) == [*range(groups.pairs)]
    one = grouped(torch.zeros(tokens, 1, dtype=torch.int32, device=device), count)
    assert one.tiles is not None
    assert covered(one, one.tiles) == [*range(tokens)], "all to one expert"


@pytest.mark.parametrize(("count", "per_token", "tokens"), SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_products_and_sums(count: int, per_token: int, tokens: int, turned: bool, device: torch.device) -> None:
    """With the columns of the weights side by side, or the rows. A sum of 40 products is off by 40 u at most."""
    hidden, inter = 40, 20
    weights, chosen = route(logits(count, tokens).to(device), per_token, normalised=True)
    up, down = random(device, count, inter, hidden), random(device, count, hidden, inter, 1)[..., 0]
    bias, x = random(device, count, inter), random(device, tokens, 2 * hidden)[:, ::2]
    if turned:
        up = up.transpose(1, 2).contiguous().transpose(1, 2)
    groups = grouped(chosen, count)
    products = product(product(x, up, bias, groups, gather=True), down, None, groups, gather=False)
    found = combined(products, weights, groups)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    for token in range(tokens):
        for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            inside = up[expert].double() @ x[token].double() + bias[expert].double()
            expected[token] += weight * (down[expert].double() @ inside)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3e-4)


def test_a_token_gets_the_same_bits_whoever_stands_beside_it(device: torch.device) -> None:
    weights = random(device, 6, 16, 32)
    x = random(device, 7, 32)
    shares, chosen = route(logits(6, 7).to(device), 2, normalised=True)
    alone = []
    for token in range(7):
        one = slice(token, token + 1)
        groups = grouped(chosen[one], 6)
        alone.append(combined(product(x[one], weights, None, groups, gather=True), shares[one], groups))
    groups = grouped(chosen, 6)
    together = combined(product(x, weights, None, groups, gather=True), shares, groups)
    assert torch.equal(together, torch.cat(alone))


def test_one_launch_each_and_no_look_at_data(device: torch.device) -> None:
    """The number of launches does not depend on the number of tokens or of experts."""
    weights = random(device, 6, 16, 32)
    for tokens in (1, 9):
        launches: list[str] = []
        x, found = random(device, tokens, 32), logits(6, tokens).to(device)

        def note(launch: Launch, launches: list[str] = launches) -> bool:
            launches.append(str(getattr(launch.kernel, "__name__", "")))
            return False

        with NoLooks(device), observed(note):
            shares, chosen = route(found, 2, normalised=True)
            groups = grouped(chosen, 6)
            combined(product(x, weights, None, groups, gather=True), shares, groups)
        assert launches == ["route_kernel", "group_kernel", "product_kernel", "combine_kernel"]


def test_many_pairs_are_sorted_without_a_look_at_data(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_FEW_PAIRS", 0)
    chosen = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=device)
    grouped(chosen, 6)
    with NoLooks(device):
        groups = grouped(chosen, 6)
    assert all(getattr(groups, field.name) is not None for field in fields(groups))
