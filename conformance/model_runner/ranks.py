"""The suite of ModelRunner: what ranks ask of the network is the same, whether they draw tokens or not."""

from __future__ import annotations

from pegboard.conformance.model_runner.base import RunnerSuite
from pegboard.conformance.suite import capability


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
