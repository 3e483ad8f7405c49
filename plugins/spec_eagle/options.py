"""Options of EAGLE heads. The names are SGLang's, less their prefix."""

from __future__ import annotations

from pydantic import Field, model_validator

from pegboard.toolkit.speculation.accepting import AcceptOptions

MOST_WRITTEN = 64
"""Most drafted tokens of a request that attention tells apart by bits."""


class EagleOptions(AcceptOptions):
    """Which head drafts, how far and how wide, and which drafts stand."""

    draft: str = ""
    """The directory of the head's checkpoint, with config.json and safetensors files."""

    steps: int = Field(default=3, ge=1, le=16)
    """Number of tokens that are drafted ahead. Each takes a pass of the head."""

    topk: int = Field(default=1, ge=1, le=16)
    """Number of tokens that may follow each drafted token. 1 drafts chains, which every attention backend can
    verify."""

    num_draft_tokens: int | None = Field(default=None, ge=2, le=64)
    """Nodes of a tree, including the newest token: the most probable of all drafted tokens. Unset: `steps` + 1 for a
    chain, else up to 8. `speculation.max_nodes` limits it."""

    taps: tuple[int, ...] | None = Field(default=None, min_length=1)
    """The layers whose inputs an EAGLE-3 head reads, if its config is wrong. Unset: as the config says, or else the
    third layer, the middle layer and the third from the end."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        found = super().provides(declared)
        return found if self.topk > 1 else found - {"branches"}

    @property
    def candidates(self) -> int:
        """How many tokens are drafted, of which the most probable are proposed."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def nodes(self) -> int:
        """Most nodes of a tree."""
        return self.num_draft_tokens or (self.steps + 1 if self.topk == 1 else min(8, 1 + self.candidates))

    @property
    def written(self) -> int:
        """How many drafted tokens the head itself goes on from."""
        return (self.steps - 1) * self.topk

    @model_validator(mode="after")
    def _check(self) -> EagleOptions:
        if self.topk == 1 and self.num_draft_tokens not in (None, self.steps + 1):
            raise ValueError(
                f"num_draft_tokens {self.num_draft_tokens}: a chain (topk 1) has steps + 1 = {self.steps + 1}; leave "
                "it unset, or set topk"
            )
        if self.nodes > 1 + self.candidates:
            raise ValueError(
                f"num_draft_tokens {self.num_draft_tokens}: {self.steps} steps with topk {self.topk} draft "
                f"{self.candidates} tokens, so that a tree has {1 + self.candidates} at most"
            )
        if self.written > MOST_WRITTEN:
            raise ValueError(
                f"steps {self.steps} with topk {self.topk}: (steps - 1) * topk is {self.written}, and may be "
                f"{MOST_WRITTEN} at most"
            )
        return self
