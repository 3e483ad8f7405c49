"""The suite of ModelRunner: draft trees, each of whose paths is to get what the same tokens get in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from pegboard.conformance.model_runner.base import RunnerSuite, best_sampler
from pegboard.conformance.model_runner.fakes import CPU, Rig
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.tails import Tree, path
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput

BUSH: Tree = (-1, 0, 0, 1, 1, 2, 3, 0, 5, 6)
FORK: Tree = (-1, 0, 0, 2)


class NotToBeUsed(AttentionBackend):
    """Says so."""

    def prepare(self, batch: ForwardBatch) -> None:
        raise AssertionError("the attention backend was asked to prepare a batch")

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        raise AssertionError("the attention backend was asked to attend")


class RunnerTreeTests(RunnerSuite):
    """Compared with transformers, which gets a path's tokens as a prompt."""

    @capability("tree_mask")
    def test_every_path_of_a_tree(self, prompts: list[list[int]]) -> None:
        self.check_paths(prompts)

    @capability("tree_mask")
    def test_a_tree_may_grow(self, prompts: list[list[int]]) -> None:
        self.check_growth(prompts)

    @capability("tree_mask")
    def test_an_accepted_path_goes_on(self, prompts: list[list[int]]) -> None:
        self.check_what_follows(prompts)

    @lacks("own_attention")
    def test_trees_by_the_attention_backend(self, prompts: list[list[int]]) -> None:
        """One that has the capability. All the runner has to do is to leave the batch alone."""
        self.check_paths(prompts)
        self.check_growth(prompts)
        self.check_what_follows(prompts)

    @capability("own_attention")
    @lacks("tree_mask")
    def test_trees_are_refused(self, prompts: list[list[int]]) -> None:
        rig = self.rig()
        rig.step({0: prompts[0]}, None)
        with pytest.raises(Unsupported, match="tree_mask"):
            rig.run_trees({0: prompts[1][:10]}, {0: BUSH})

    @capability("own_attention")
    def test_the_attention_backend_is_not_used(self, prompts: list[list[int]]) -> None:
        model = self.make_model()
        ctx = AttentionContext(model.spec.layers, self.page_size, model.model.dtype, CPU, 4, model.spec.max_context_len)
        run = PagedRun(
            model.network,
            model.spec,
            attention=NotToBeUsed(None, ctx),
            dtype=model.model.dtype,
            page_size=self.page_size,
        )
        sampler = best_sampler(model.spec.vocab_size)
        rig = Rig(self.build(self.make_context(run, model, model.network, sampler, ())), run)
        rig.step({0: prompts[0][:-1], 1: prompts[1]})
        output = rig.step({0: prompts[0][-1:]}, decode=True, return_logits=True)
        self.check_greedy(output, self.expected(prompts[0])[-1:])

    def check_paths(self, prompts: list[list[int]]) -> None:
        """Two trees, behind a prompt of some length and at the beginning, beside a chunk and a token that decodes."""
        rig = self.rig()
        rig.step({0: prompts[0][:17], 1: prompts[0], 3: prompts[1][:9]}, None)
        trees = {0: BUSH, 2: FORK}
        new = {0: prompts[1][:10], 3: prompts[1][9:], 2: prompts[2][:4], 1: prompts[2][:1]}
        output = rig.run_trees(new, trees)
        before = {0: prompts[0][:17], 1: prompts[0], 2: [], 3: prompts[1][:9]}
        self.check_nodes(output, before, new, trees)

    def check_growth(self, prompts: list[list[int]]) -> None:
        """Level after level: what is cached already is in the tail, too. Last a single node, alone and in company."""
        rig, tokens = self.rig(), prompts[1][:10]
        before = {0: prompts[0][:20], 1: prompts[2]}
        rig.step(before, None)
        for first, last in ((0, 3), (3, 8), (8, 9)):
            output = rig.run_trees({0: tokens[first:last]}, {0: BUSH[:last]}, decode=last - first == 1)
            self.check_nodes(output, before, {0: tokens[:last]}, {0: BUSH[:last]}, first)
        output = rig.run_trees({0: tokens[9:], 1: prompts[2][:2]}, {0: BUSH})
        assert output.logits is not None
        expected = [prompts[0][:20] + [tokens[node] for node in path(BUSH, 9)]]
        expected += [prompts[2] + prompts[2][:1], prompts[2] + prompts[2][:2]]
        self.check_greedy(output, torch.stack([self.expected(one)[-1] for one in expected]))

    def check_what_follows(self, prompts: list[list[int]]) -> None:
        """Compare with the runner itself, which gets a path's tokens in a row: its keys and values do, wherever they
        are moved.
        """
        rig, other, tokens = self.rig(), self.rig(), prompts[1][:10]
        rig.step({0: prompts[0][:15]}, None)
        rig.run_trees({0: tokens}, {0: BUSH})
        taken = path(BUSH, 9)
        row = torch.from_numpy(rig.run.table[1]).long()
        rig.pool.move(row[torch.tensor(taken) + 15], row[15 : 15 + len(taken)])
        kept = prompts[0][:15] + [tokens[node] for node in taken]
        rig.run.tokens[0] = list(kept)
        other.step({0: kept}, None)
        for token in prompts[2][:2]:
            expected = other.step({0: [token]}, decode=True, return_logits=True).logits
            assert expected is not None
            self.check_greedy(rig.step({0: [token]}, decode=True, return_logits=True), expected)

    def check_nodes(
        self,
        output: ForwardOutput,
        before: Mapping[int, Sequence[int]],
        new: Mapping[int, Sequence[int]],
        trees: Mapping[int, Tree],
        first: int = 0,
    ) -> None:
        """Check the logits of all new tokens, from the node `first` on; a request without a tree has a chain."""
        expected = []
        for request, tokens in new.items():
            tree = trees.get(request, range(-1, len(tokens) - 1))
            for node in range(first, len(tokens)):
                context = [*before[request], *(tokens[one] for one in path(tree, node))]
                expected.append(self.expected(context)[-1])
        self.check_greedy(output, torch.stack(expected))
