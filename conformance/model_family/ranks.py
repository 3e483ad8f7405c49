"""The suite of ModelFamily: networks of which each rank computes a share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite, assert_close
from pegboard.conformance.rig.model_references import context, prompts
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.ranks import on_ranks
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.toolkit.kernels import usable_on_cpu
from pegboard.toolkit.model.ranks import PENDING, SERVICE, Ranks

SIZE = 2
NEVER = 127
"""Ranks that no tiny model can be dealt out to."""


class RankTests(ModelSuite):
    """Compared with one process. Models that are refused on several ranks are left out."""

    @pytest.fixture
    def threads(self) -> None:
        """Skip where ranks cannot be threads."""
        if usable_on_cpu():
            pytest.skip("ranks are threads here, and Triton's interpreter runs in one at a time")

    @pytest.mark.usefixtures("threads")
    @capability("ranks")
    def test_ranks_have_the_logits_of_one(self, architecture: str, checkpoint: Path) -> None:
        """Rank 0 alone has them; the hidden states are the same bits on all ranks."""
        self.skip_if_it_objects(on_ranks_of(checkpoint, Ranks(SIZE)))
        long, middle, short = prompts(checkpoint)
        steps = ({0: long[:30], 1: middle[:-1]}, {0: long[30:], 1: middle[-1:], 2: short})

        def computes(ranks: Ranks) -> list[tuple[torch.Tensor, torch.Tensor]]:
            run = self._shared(checkpoint, ranks)
            return [_computed(run, step) for step in steps]

        (alone,), found = on_ranks(1, computes), on_ranks(SIZE, computes)
        for step, (_, logits) in enumerate(alone):
            assert_close(found[0][step][1], logits)
            states = [rank[step][0] for rank in found]
            assert torch.equal(states[0], states[1]), "ranks hold different hidden states"

    @pytest.mark.usefixtures("threads")
    @capability("ranks")
    def test_ids_that_only_rank_0_knows(self, architecture: str, checkpoint: Path) -> None:
        self.skip_if_it_objects(on_ranks_of(checkpoint, Ranks(SIZE)))
        prompt = prompts(checkpoint)[1]

        def computes(ranks: Ranks) -> torch.Tensor:
            run = self._shared(checkpoint, ranks)
            given = prompt if ranks.index == 0 else [0] * len(prompt)
            return _computed(run, {0: given}, pending=ranks.size > 1)[1]

        (alone,), found = on_ranks(1, computes), on_ranks(SIZE, computes)
        assert_close(found[0], alone)

    @capability("ranks")
    def test_sizes_that_do_not_divide_are_refused(self, architecture: str, checkpoint: Path) -> None:
        self.skip_if_it_objects(context(checkpoint))
        assert self.objection(on_ranks_of(checkpoint, Ranks(NEVER))), f"{NEVER} ranks are not refused"

    def _shared(self, checkpoint: Path, ranks: Ranks) -> PagedRun:
        family = self.build(on_ranks_of(checkpoint, ranks))
        return PagedRun(family.load(), family.spec)


def on_ranks_of(checkpoint: Path, ranks: Ranks) -> ModelContext:
    """Return what the family of one of these ranks is built from."""
    return replace(context(checkpoint), services={SERVICE: ranks})


@torch.inference_mode()
def _computed(run: PagedRun, new: dict[int, list[int]], *, pending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    batch = run.batch(new)
    if pending:
        batch.extras[PENDING] = True
    run.attention.prepare(batch)
    hidden = run.network.forward(batch)
    return hidden, run.network.logits(hidden)
