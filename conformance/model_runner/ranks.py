"""The suite of ModelRunner: what ranks ask of the network is the same, whether they draw tokens or not."""

from __future__ import annotations

import torch

from pegboard.conformance.model_runner.base import RunnerSuite
from pegboard.conformance.model_runner.fakes import WatchedNetwork
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.toolkit.model.sections import wanted_rows


class RunnerRankTests(RunnerSuite):
    """For runners of which several compute one network together: one draws tokens, and the others only follow."""

    @capability("ranks")
    def test_the_same_rows_of_logits_with_and_without_draws(self, prompts: list[list[int]]) -> None:
        """Of prompts, of a batch of which some requests draw, and of decodes."""
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
