"""Attention alone, of tokens that see some of the last keys only: against float64, each over the keys that it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.attention.trees import BUSH, CHAIN, COMB, STAR, draw_tree
from pegboard.conformance.properties import properties
from pegboard.conformance.rig.tails import Tree, as_int64, seen_keys, tree_bits
from pegboard.plugins.cpu_native.model import NativeModel
from tests.plugins.cpu_native.instruction_sets import EACH, SETS
from tests.plugins.cpu_native.test_attention import HEADS, Case, check, model

LOUD = 1e4
OTHERS = [name for name in HEADS if name not in ("3x64", "2x128")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


class TreeCase(Case):
    """Requests whose last tokens may be a tree."""

    def __init__(self, kv_heads: int, dim: int, seed: int = 0) -> None:
        super().__init__(kv_heads, dim, seed)
        self.trees: list[Tree] = []
        self.judged: list[torch.Tensor] = []

    def request(self, *slots: list[int], new: int = 1) -> None:
        super().request(*slots, new=new)
        self.trees.append(())
        self.judged.append(torch.ones(new, dtype=torch.bool))

    def treed(self, before: list[int], tree: Tree, new: int, loud: int | None = None) -> None:
        """One that ends with a tree, whose `new` last nodes are computed; the node `loud` is for those that see it."""
        slots = self.slots(len(tree))
        super().request(before, slots, new=new)
        self.trees.append(tree)
        self.judged.append(torch.ones(new, dtype=torch.bool))
        if loud is not None:
            self.keys[slots[loud]] = self.values[slots[loud]] = LOUD
            self.judged[-1] = ~torch.tensor([bool(bits >> loud & 1) for bits in tree_bits(tree)[-new:]])

    def batch(self, only: int | None = None) -> Any:
        batch = super().batch(only)
        which = range(len(self.requests)) if only is None else [only]
        batch.tail_lens = torch.tensor([len(self.trees[one]) for one in which])
        bits: list[int] = []
        for one in which:
            new = self.requests[one][1]
            bits += tree_bits(self.trees[one])[-new:] if self.trees[one] else [0x5A5A5A5A5A5A5A5A] * new
        batch.tail_bits = torch.from_numpy(as_int64(bits))
        return batch

    def exact(self, queries: torch.Tensor, window: int) -> torch.Tensor:
        found, at = super().exact(queries, window), 0
        group = queries.shape[1] // self.kv_heads
        for (slots, new), tree in zip(self.requests, self.trees, strict=True):
            for row, bits in enumerate(tree_bits(tree)[-new:]):
                first_seen = make_layer(window=window or None).first_seen
                seen = torch.tensor(slots)[seen_keys(len(slots), len(tree), bits, first_seen)]
                keys, values = (one[seen].double().repeat_interleave(group, 1) for one in (self.keys, self.values))
                scores = torch.einsum("hd,khd->hk", queries[at + row].double(), keys) * self.dim**-0.5
                found[at + row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
            at += new
        return found


def check_judged(case: TreeCase, native: NativeModel, window: int = 0) -> None:
    """As `check`, of the tokens that do not see what is loud."""
    queries = torch.randn(case.batch().num_tokens, native.spec.num_heads, case.dim, generator=torch.manual_seed(3))
    judged = torch.cat(case.judged)
    if not bool(judged.any()):
        return
    found, exact = (
        one[judged] for one in (native.attend(case.batch(), 0, queries).double(), case.exact(queries, window))
    )
    error = (found - exact).abs()
    assert bool(error.isfinite().all()), "NaN of slots that are not theirs"
    assert float(error.max()) < 0.03 * max(1.0, float(exact.abs().max()))


def bushes(case: TreeCase) -> None:
    """All nodes are new; or the last ones; beside prompts and requests that decode, some with prefixes in common."""
    prefix = case.slots(260)
    case.treed(case.slots(7), BUSH, 10)
    case.request(case.slots(30), new=8)
    case.treed(prefix, BUSH, 4)
    case.treed([*prefix, *case.slots(9)], BUSH, 10)
    case.request(prefix, case.slots(30))
    case.treed([*prefix, *case.slots(70)], BUSH, 1)
    case.treed([], BUSH, 10)
    case.request(case.slots(90))


def singles(case: TreeCase) -> None:
    """One new node each: in the last bite of keys, over two of them, after a cut prefix."""
    for before in (0, 3, 15, 16, 31, 120, 200):
        for tree in (BUSH, COMB, STAR, (-1, 0, 0)):
            case.treed(case.slots(before), tree, 1)
        case.request(case.slots(before + 1))
    case.treed(case.slots(900), STAR, 1)


def large(case: TreeCase) -> None:
    """The last bit is a number's sign; and a tree whose nodes are more than a task takes."""
    for tree in (CHAIN, STAR, COMB):
        case.treed(case.slots(130), tree, 64)
        case.treed(case.slots(70), tree, 33)


CASES = {one.__name__: one for one in (bushes, singles, large)}


@pytest.mark.parametrize("arrangement", CASES)
@pytest.mark.parametrize("window", [0, 5, *(pytest.param(one, marks=pytest.mark.full) for one in (1, 40))])
@pytest.mark.parametrize("instructions", EACH)
def test_trees(directory: Path, instructions: str, window: int, arrangement: str) -> None:
    case = TreeCase(3, 64)
    CASES[arrangement](case)
    check(case, model(directory, instructions, "3x64", window, 2), window)


@pytest.mark.parametrize("heads", ["2x128", *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)])
@pytest.mark.parametrize("instructions", EACH)
def test_heads_of_other_sizes(directory: Path, instructions: str, heads: str) -> None:
    for arrange in (bushes, singles):
        case = TreeCase(HEADS[heads][0], HEADS[heads][2])
        arrange(case)
        check(case, model(directory, instructions, heads, 0, 1))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("instructions", EACH)
def test_branches_do_not_meet(directory: Path, instructions: str, window: int) -> None:
    """Whatever other branches hold, new or cached."""
    case = TreeCase(3, 64)
    for loud in (1, 2, 5):
        for before in (0, 14, 150):
            for new in (10, 4, 1):
                case.treed(case.slots(before), BUSH, new, loud)
    check_judged(case, model(directory, instructions, "3x64", window, 2), window)


def test_a_chain_is_causal(directory: Path) -> None:
    case = TreeCase(3, 64)
    for before, new in ((9, 7), (0, 12), (200, 3)):
        case.treed(case.slots(before), CHAIN[:new], new)
    with_tails = check(case, model(directory, SETS[0], "3x64", 0, 2))
    case.trees = [()] * 3
    torch.testing.assert_close(check(case, model(directory, SETS[0], "3x64", 0, 2)), with_tails, rtol=0, atol=0)


def test_tails_must_fit(directory: Path) -> None:
    """Native code would read beyond its memory."""
    case = TreeCase(3, 64)
    case.treed(case.slots(9), BUSH, 10)
    native, queries = model(directory, SETS[0], "3x64", 0, 2), torch.zeros(10, 9, 64)
    for tail_lens, bits in ((65, 10), (20, 10), (-1, 10), (10, 9)):
        batch = case.batch()
        batch.tail_lens, batch.tail_bits = torch.tensor([tail_lens]), batch.tail_bits[:bits]
        with pytest.raises(ValueError, match="tails of 1 requests"):
            native.attend(batch, 0, queries)


def check_any(directory: Path, data: st.DataObject, instructions: str) -> None:
    draw = data.draw
    window = draw(st.sampled_from((0, 1, 5, 40)), "window")
    case = TreeCase(3, 64, draw(st.integers(0, 9), "seed"))
    prefix = case.slots(draw(st.sampled_from((0, 150)), "shared"))
    for _ in range(draw(st.integers(1, 6), "requests")):
        own = case.slots(draw(st.integers(0, draw(st.sampled_from((20, 150)))), "before"))
        before = [*(prefix if draw(st.booleans(), "shares") else ()), *own]
        more = draw(st.integers(0, draw(st.sampled_from((6, 63)))), "nodes")
        tree = draw_tree(draw(st.lists(st.integers(0, 64), min_size=more, max_size=more), "tree"))
        new = draw(st.integers(1, len(tree)), "new")
        loud = draw(st.one_of(st.none(), st.integers(1, more)), "loud") if more else None
        if draw(st.sampled_from((True, True, True, False)), "treed"):
            case.treed(before, tree, new, loud)
        else:
            case.request(before, case.slots(len(tree)), new=new)
    check_judged(case, model(directory, instructions, "3x64", window, 1), window)


@properties(max_examples=20)
@given(data=st.data())
def test_any_trees(directory: Path, data: st.DataObject) -> None:
    check_any(directory, data, SETS[0])


@pytest.mark.full
@pytest.mark.parametrize("instructions", SETS)
def test_any_more_trees(directory: Path, instructions: str) -> None:
    @properties(max_examples=120 if instructions == SETS[0] else 40)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_any(directory, data, instructions)

    run()
