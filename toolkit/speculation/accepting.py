"""For speculators that judge drafts by thresholds: shared options and code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from pegboard.core.interfaces.options import Options

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.sampling import SamplingBatch
    from pegboard.core.interfaces.trees import Accepted, TokenTrees


class AcceptOptions(Options):
    """Which drafts stand. The capability `judges` is there only with thresholds."""

    accept: Literal["match", "thresholds"] = "match"
    """Which drafts are accepted. `match`: those that the model draws itself, so that answers do not change.
    `thresholds`: those that are likely enough. Then a seed gives other tokens than without drafts, and with thresholds
    below 1, requests with a temperature get worse answers, which favour what was drafted."""

    accept_threshold_single: float = Field(default=1.0, ge=0.0, le=1.0)
    """With `thresholds`: drafts with at least this probability are accepted."""

    accept_threshold_acc: float = Field(default=1.0, ge=0.0, le=1.0)
    """With `thresholds`: other drafts are accepted with their probability divided by this."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared if self.accept == "thresholds" else declared - {"judges"}

    def accepted(self, trees: TokenTrees, logits: torch.Tensor, sampling: SamplingBatch) -> Accepted:
        """Return what stands by the thresholds, see `Speculator.accept`."""
        from pegboard.toolkit.speculation.judging import accept_by_thresholds, probabilities, toss

        probs, coins = probabilities(logits, sampling), toss(trees, sampling.seeds, sampling.steps)
        return accept_by_thresholds(trees, probs, *coins, self.accept_threshold_single, self.accept_threshold_acc)

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.accept == "match" and min(self.accept_threshold_single, self.accept_threshold_acc) < 1.0:
            raise ValueError("accept_threshold_single and accept_threshold_acc below 1 need accept: thresholds")
        return self
