"""The suite of AttentionBackend: tokens that see some of the last keys only, as the nodes of a draft tree do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.base import TOLERANCES, AttentionSuite
from pegboard.conformance.attention.batches import Lens, make_layer, make_sinks
from pegboard.conformance.attention.tree_rig import TreeRig
from pegboard.conformance.properties import properties
from pegboard.conformance.rig.tails import Tree
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.layers import LayerSpec

CPU = torch.device("cpu")

BUSH: Tree = (-1, 0, 0, 1, 1, 2, 3, 0, 5, 6)
"""Branches at several nodes, and neighbours that are not each other's ancestors."""

CHAIN: Tree = tuple(range(-1, 63))
STAR: Tree = (-1, *[0] * 63)
COMB: Tree = (-1, *(node - 2 + node % 2 for node in range(1, 64)))
"""A path of every second node, each with a leaf: the deepest ones see the highest bits."""


@dataclass(frozen=True)
class Trees:
    """Requests, (tokens of KV before the batch, new tokens), and the tree at the end of each."""

    lens: Lens
    trees: Sequence[Tree]


VERIFIED = Trees(((7, 10), (0, 10), (41, 4)), (BUSH, BUSH, (-1, 0, 0, 1)))
"""All nodes are new."""

DRAFTED = Trees(((7 + 7, 3), (4, 6), (41 + 9, 1)), (BUSH, BUSH, BUSH))
"""The first nodes are cached."""

SINGLE = Trees(((9 + 9, 1), (30, 1), (8, 1), (5, 1), (90, 1)), (BUSH, (), (-1, 0, 0, 0, 1, 2, 3, 2, 3), (), (-1, 0, 0)))
"""Requests of one new token each, some of them without a tail."""

MIXED = Trees(((5, 3), (6, 1), (17, 3), (0, 4), (22, 1)), ((), (), BUSH, (), BUSH))


class AttentionTreeTests(AttentionSuite):
    """Against each token alone over the keys that it sees."""

    tree_examples: ClassVar[tuple[int, int]] = (20, 90)
    """Random batches in `make test`, and larger ones in `make test-full`: fewer for a backend that is slow on a CPU."""

    def check_trees(
        self,
        layer: LayerSpec,
        trees: Trees,
        device: torch.device = CPU,
        *,
        mode: ForwardMode | None = None,
        loud: Sequence[int | None] = (),
        dtype: torch.dtype = torch.float32,
        page_size: int = 4,
        seed: int = 0,
    ) -> None:
        """Run and compare one layer."""
        if mode is None:
            single = all(new == 1 for _, new in trees.lens)
            mode = ForwardMode.DECODE if single else ForwardMode.TARGET_VERIFY
        kind = {"page_size": page_size, "dtype": dtype, "device": device, "seed": seed}
        rig = TreeRig([layer], trees.lens, trees.trees, loud=loud, **kind)
        sinks = make_sinks(layer, device)
        out = rig.run(self.make(rig), mode=mode, sinks=sinks)
        self.check_judged(rig, out, sinks=sinks)

    def check_judged(self, rig: TreeRig, out: torch.Tensor, index: int = 0, sinks: torch.Tensor | None = None) -> None:
        expected = rig.expected(index, sinks)
        assert out.shape == expected.shape
        assert out.dtype == rig.dtype
        error = (out.cpu().double() - expected).abs().flatten(1).amax(1)[rig.judged]
        bound = TOLERANCES[rig.dtype]
        wrong = (~(error <= bound)).nonzero().flatten().tolist()
        if wrong:
            row = int(rig.judged.nonzero().flatten()[wrong[0]])
            owners = torch.arange(len(rig.new)).repeat_interleave(torch.from_numpy(rig.new))
            owner = int(owners[row])
            pytest.fail(
                f"{rig.layers[index]}: {len(wrong)} of {len(error)} tokens are off, the worst by "
                f"{float(error[wrong].max()):.3g} (allowed: {bound}); first packed token {row} of request {owner}, "
                f"with {rig.prefix[owner]} cached and {rig.new[owner]} new tokens and the tree {rig.trees[owner]}"
            )

    @capability("tree_mask")
    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("trees", [VERIFIED, DRAFTED, SINGLE], ids=["verified", "drafted", "single"])
    def test_trees(self, trees: Trees, page_size: int, device: torch.device) -> None:
        self.check_trees(make_layer(), trees, device, page_size=page_size)

    @capability("tree_mask")
    @pytest.mark.parametrize("trees", [SINGLE, MIXED], ids=["single", "mixed"])
    def test_trees_in_mixed_batches(self, trees: Trees, device: torch.device) -> None:
        self.check_trees(make_layer(6, 2, 24, 16), trees, device, mode=ForwardMode.MIXED)

    @capability("tree_mask")
    @pytest.mark.parametrize("lens", [(3, 64), (66, 1)], ids=["verified", "drafted"])
    @pytest.mark.parametrize("tree", [CHAIN, STAR, COMB], ids=["chain", "star", "comb"])
    def test_trees_of_64_nodes(self, tree: Tree, lens: tuple[int, int], device: torch.device) -> None:
        """The last node's bit is the sign of its number."""
        self.check_trees(make_layer(1, 1), Trees([lens], [tree]), device)

    @capability("tree_mask")
    def test_branches_do_not_meet(self, device: torch.device) -> None:
        """Whatever other branches hold, new or cached, it adds nothing to a token."""
        trees = Trees([(7, 10), (12, 5), (6 + 9, 1)], [BUSH] * 3)
        for layer in (make_layer(2, 1), make_layer(2, 1, logit_cap=5.0 if self.has("logit_cap") else None)):
            for loud in (1, 5):
                self.check_trees(layer, trees, device, loud=(loud, loud, 4))

    @capability("tree_mask")
    def test_a_chain_is_causal(self, device: torch.device) -> None:
        rig = TreeRig([make_layer(2, 1)], [(9, 7), (0, 12)], [CHAIN[:7], CHAIN[:12]], device=device)
        out = rig.run(self.make(rig), mode=ForwardMode.TARGET_VERIFY)
        plain = TreeRig([make_layer(2, 1)], [(9, 7), (0, 12)], [(), ()], device=device)
        torch.testing.assert_close(out, plain.run(self.make(plain)), rtol=0, atol=TOLERANCES[torch.float32])

    @capability("tree_mask")
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_trees_in_16_bits(self, dtype: torch.dtype, device: torch.device) -> None:
        self.check_trees(make_layer(3, 1, 32), MIXED, device, dtype=dtype, loud=(None, None, 4))

    @capability("tree_mask")
    @capability("sliding_window")
    @pytest.mark.parametrize("window", [1, 3, 9])
    def test_windows_count_places(self, window: int, device: torch.device) -> None:
        """And not slots: what stands in between belongs to other branches."""
        deep = Trees([(0, 24), (50, 14), (13, 3)], [COMB[:24], COMB, STAR[:12]])
        for trees in (SINGLE, deep):
            self.check_trees(make_layer(1, 1, window=window), trees, device)

    @capability("tree_mask")
    @capability("logit_cap")
    @capability("sinks")
    def test_trees_with_cap_and_sinks(self, device: torch.device) -> None:
        self.check_trees(make_layer(6, 2, scale=0.8, logit_cap=2.0, sinks=True), MIXED, device)

    @capability("tree_mask")
    def test_trees_behind_long_prefixes(self, device: torch.device) -> None:
        trees = Trees([(300, 10), (290 + 7, 3), (280, 1), (260, 5), (270 + 9, 1)], [BUSH, BUSH, (), (), BUSH])
        self.check_trees(make_layer(1, 1), trees, device, page_size=16)

    @capability("tree_mask")
    @pytest.mark.parametrize("trees", [SINGLE, MIXED], ids=["single", "mixed"])
    @torch.inference_mode()
    def test_trees_over_layers(self, trees: Trees, device: torch.device) -> None:
        """One `prepare` for layers that differ, with row tables of their own."""
        windows = (4, 11) if self.has("sliding_window") else (None, None)
        layers = [make_layer(2, 1), make_layer(4, 2, 24, layer_id=1, window=windows[0])]
        layers += [make_layer(5, 1, 8, layer_id=2, kv_group=1), make_layer(2, 1, layer_id=3, window=windows[1])]
        rig = TreeRig(layers, trees.lens, trees.trees, device=device)
        backend = self.make(rig)
        batch = rig.batch(backend, ForwardMode.MIXED)
        backend.prepare(batch)
        for index, layer in enumerate(layers):
            self.check_judged(rig, backend.forward(rig.q[index], *rig.new_kv(index), layer, batch), index)

    @capability("tree_mask")
    def test_trees_leave_nothing_behind(self, device: torch.device) -> None:
        """The batches after a tree, with and without one, are as they would be alone."""
        lens: Lens = ((9, 5), (12, 1))
        with_trees = TreeRig([make_layer()], lens, ((-1, 0, 0, 1, 2), (-1, 0, 0)), device=device)
        others = TreeRig([make_layer()], lens, ((-1, 0, 1, 0, 0), (-1, 0, 1)), device=device, seed=2)
        backend = self.make(with_trees)
        for rig in (with_trees, others):
            self.check_judged(rig, rig.run(backend, mode=ForwardMode.TARGET_VERIFY))
        plain = TreeRig([make_layer()], lens, ((), ()), device=device, seed=1)
        batch = plain.batch(backend, ForwardMode.MIXED)
        with torch.inference_mode():
            batch = replace(batch, tail_lens=None, tail_bits=None, tail_lens_cpu=None)
            backend.prepare(batch)
            self.check_judged(plain, backend.forward(plain.q[0], *plain.new_kv(), plain.layers[0], batch))

    @lacks("tree_mask")
    def test_trees_are_refused(self, device: torch.device) -> None:
        """Objecting beforehand or raising Unsupported: what must not happen is a silent wrong answer."""
        for trees in (VERIFIED, SINGLE):
            rig = TreeRig([make_layer()], trees.lens, trees.trees, device=device)
            if self.objection(rig.context_for()) is None:
                with pytest.raises(Unsupported, match="tree_mask"):
                    rig.run(self.make(rig))

    @capability("tree_mask")
    def test_any_trees(self) -> None:
        @properties(max_examples=self.tree_examples[0])
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            self.check_drawn_trees(data, requests=3, nodes=12, longest=24, device=CPU)

        check()

    @pytest.mark.full
    @capability("tree_mask")
    def test_any_larger_trees(self) -> None:
        @properties(max_examples=self.tree_examples[1])
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            self.check_drawn_trees(data, requests=5, nodes=64, longest=300, device=CPU)

        check()

    @pytest.mark.gpu
    @capability("tree_mask")
    @properties(max_examples=300)
    @given(data=st.data())
    def test_any_trees_on_gpu(self, data: st.DataObject) -> None:
        self.check_drawn_trees(data, requests=5, nodes=64, longest=300, device=torch.device("cuda"))

    def check_drawn_trees(
        self, data: st.DataObject, requests: int, nodes: int, longest: int, device: torch.device
    ) -> None:
        """So many requests with trees, and up to two without. Small ones are more frequent."""
        draw = data.draw
        trees, lens, loud = [], [], []
        single = draw(st.booleans(), "single")
        for _ in range(requests):
            more = draw(st.integers(0, draw(st.sampled_from((6, 6, nodes - 1)))), "nodes")
            tree = draw_tree(draw(st.lists(st.integers(0, nodes), min_size=more, max_size=more), "tree"))
            new = 1 if single else draw(st.integers(1, len(tree)), "new")
            prefix = draw(st.integers(0, draw(st.sampled_from((9, 9, longest)))), "prefix")
            lens.append((prefix + len(tree) - new, new))
            loud.append(draw(st.one_of(st.none(), st.integers(0, len(tree) - 1)), "loud"))
            trees.append(tree)
        for prefix, new in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=2), "others"):
            lens.append((prefix, 1 if single else new))
            trees.append(())
        kv_heads = draw(st.sampled_from((1, 1, 2)), "kv heads")
        layer = make_layer(
            kv_heads * draw(st.integers(1, 4), "group"),
            kv_heads,
            draw(st.sampled_from((8, 16, 20)), "dim"),
            window=draw(st.sampled_from((None, 1, 3, 16, 33)), "window") if self.has("sliding_window") else None,
            logit_cap=draw(st.sampled_from((None, 0.7, 20.0)), "cap") if self.has("logit_cap") else None,
            sinks=draw(st.booleans(), "sinks") if self.has("sinks") else False,
        )
        page_size = draw(st.sampled_from((1, 4, 16)), "page size")
        self.check_trees(layer, Trees(lens, trees), device, loud=loud, page_size=page_size)


def draw_tree(numbers: Sequence[int]) -> Tree:
    """Return a tree of one node more than there are numbers: each says, modulo what there is, where a node hangs."""
    return (-1, *(number % (index + 1) for index, number in enumerate(numbers)))
