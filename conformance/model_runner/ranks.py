"""The suite of ModelRunner: ranks answer as one process does, whether they draw tokens or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pegboard.conformance.model_runner.base import RunnerSuite, best_sampler
from pegboard.conformance.model_runner.fakes import Rig, WatchedNetwork
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.ranks import lonely, on_ranks
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.toolkit.kernels import usable_on_cpu
from pegboard.toolkit.model.ranks import PENDING, SERVICE, Ranks
from pegboard.toolkit.model.sections import wanted_rows

SIZE = 2
NEVER = 127
"""Ranks that no tiny model can be dealt out to."""


class RunnerRankTests(RunnerSuite):
    """For runners of which several compute one network together: one draws tokens, and the others only follow."""

    @pytest.fixture
    def threads(self) -> None:
        """Skip where ranks cannot be threads."""
        if usable_on_cpu():
            pytest.skip("ranks are threads here, and Triton's interpreter runs in one at a time")

    def shared_rig(self, ranks: Ranks) -> Rig:
        """Return one rank's runner over memory of its own."""
        return self.rig(model=self.make_shared(ranks))

    @pytest.mark.usefixtures("threads")
    @capability("ranks")
    def test_ranks_have_the_logits_of_one(self, prompts: list[list[int]]) -> None:
        """Of prompts in chunks, of a batch of which some requests draw, and of decodes. Rank 0 has them."""
        first, second = {0: prompts[0], 1: prompts[1][:5]}, {1: prompts[1][5:-1], 2: prompts[2]}
        third = {1: prompts[1][-1:]}

        def computes(ranks: Ranks) -> list[torch.Tensor | None]:
            rig = self.shared_rig(ranks)
            if ranks.index:
                followed = (rig.followed(first), rig.followed(second, sampled=[2]), rig.followed(third, decode=True))
                return [output.logits for output in followed]
            drawn = (
                rig.step(first, return_logits=True),
                rig.step(second, sampled=[2], return_logits=True),
                rig.step(third, decode=True, return_logits=True),
            )
            for output in drawn:
                assert output.logits is not None
                assert output.next_token_ids.tolist() == output.logits.argmax(-1).tolist()
            return [output.logits for output in drawn]

        found, _ = on_ranks(SIZE, computes)
        whole, middle, short = (self.expected(prompt) for prompt in prompts)
        self.check_logits(found[0], torch.stack([whole[-1], middle[4]]))
        self.check_logits(found[1], short[-1:])
        self.check_logits(found[2], middle[-1:])

    @pytest.mark.usefixtures("threads")
    @capability("ranks")
    def test_ids_that_only_rank_0_knows(self, prompts: list[list[int]]) -> None:
        def computes(ranks: Ranks) -> torch.Tensor | None:
            rig = self.shared_rig(ranks)
            batch = rig.run.batch({0: prompts[1]})
            batch.logits_indices = torch.tensor([len(prompts[1]) - 1])
            batch.extras[PENDING] = True
            if ranks.index:
                batch.input_ids.zero_()
            return rig.runner.execute(batch, None, return_logits=True).logits

        found, _ = on_ranks(SIZE, computes)
        self.check_logits(found, self.expected(prompts[1])[-1:])

    @pytest.mark.usefixtures("threads")
    @capability("ranks")
    def test_ranks_hold_the_same_states(self, prompts: list[list[int]]) -> None:
        """To the bit, and they have the logprobs of prompts, which ask for logits of other rows."""
        if not {"hidden_states", "input_logprobs"} <= self.capabilities:
            pytest.skip("it gives neither hidden states nor logprobs of prompts")
        new, rows, targets = {0: prompts[0], 1: prompts[1]}, [2, 40], [prompts[0][3], prompts[1][8]]

        def computes(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
            total = sum(map(len, new.values()))
            output = self.shared_rig(ranks).run_wanted(
                new, hidden_rows=range(total), logprobs=(rows, targets, [LogprobRequest()]), sampled=[]
            )
            assert output.row_states is not None
            assert output.prompt_logprobs is not None
            return output.row_states, output.prompt_logprobs.token_logprobs

        (states, found), (others, _) = on_ranks(SIZE, computes)
        assert torch.equal(states, others), "ranks hold different hidden states"
        logits = torch.stack([self.expected(prompts[0])[2], self.expected(prompts[1])[7]])
        exact = logits.double().log_softmax(-1).float().gather(1, torch.tensor(targets)[:, None]).squeeze(1)
        close = 2 * self.tolerance * float(logits.abs().max()) + 1e-5
        torch.testing.assert_close(found, exact, rtol=0, atol=close)

    @capability("ranks")
    @capability("own_weights")
    def test_sizes_that_do_not_divide_are_refused(self) -> None:
        """By a runner that reads the weights itself: else the model family does."""
        model = self.make_model()
        run = PagedRun(model.network, model.spec, dtype=model.model.dtype, page_size=self.page_size)
        ctx = self.make_context(run, model, model.network, best_sampler(model.spec.vocab_size), ())
        self.skip_if_it_objects(ctx)
        shared = replace(model.model, services={SERVICE: lonely(NEVER)})
        assert self.objection(replace(ctx, model=shared)), f"{NEVER} ranks are not refused"

    @capability("ranks")
    def test_the_same_rows_of_logits_with_and_without_draws(self, prompts: list[list[int]]) -> None:
        """Of prompts, of a batch of which some requests draw, and of decodes."""
        if "own_weights" in self.capabilities:
            pytest.skip("it asks no network for anything")
        first = {0: prompts[0], 1: prompts[1][:5]}
        second, third = {0: prompts[0][:3], 1: prompts[1][5:8]}, {0: prompts[0][3:4], 1: prompts[1][8:9]}
        draws, follows = self.watched(), self.watched()
        rig, other = self.rig(network=draws), self.rig(network=follows)
        rig.step(first, return_logits=True)
        rig.step(second, sampled=[1], return_logits=True)
        rig.step(third, decode=True, return_logits=True)
        other.followed(first)
        other.followed(second, sampled=[1])
        other.followed(third, decode=True)
        assert draws.rows == follows.rows == [2, 1, 2]

    @capability("sections")
    def test_reads_no_states_but_those_that_are_wanted(self, prompts: list[list[int]]) -> None:
        """Of the others a section may know nothing."""
        new, target = {0: prompts[0], 1: prompts[1]}, [prompts[0][3]]
        wants = ([2], target, [LogprobRequest(top=2)])
        for sampled in ([1], []):
            plain, blind = self.rig(), self.rig(network=_WantedRows(self.make_model().network))
            whole, found = (
                rig.run_wanted(new, hidden_rows=[5, 40], logprobs=wants, sampled=sampled) for rig in (plain, blind)
            )
            assert torch.equal(found.next_token_ids, whole.next_token_ids)
            assert found.row_states is not None
            assert whole.row_states is not None
            assert torch.equal(found.row_states, whole.row_states)
            assert found.prompt_logprobs is not None
            assert whole.prompt_logprobs is not None
            assert torch.equal(found.prompt_logprobs.token_logprobs, whole.prompt_logprobs.token_logprobs)


class _WantedRows(WatchedNetwork):
    """Knows no last hidden states but those that the batch wants."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden, rows = super().forward(batch), wanted_rows(batch)
        if rows is None:
            return hidden
        found = torch.full_like(hidden, torch.nan)
        return found.index_copy_(0, rows, hidden.index_select(0, rows))
