"""How many tokens a pass of the model gains with a head: worked out from its states, and measured by the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pegboard.tools.train_draft.data import StoredStates, Vocabulary
from pegboard.tools.train_draft.draft import Draft
from pegboard.tools.train_draft.train import Batches

CHAIN = 3
"""Tokens that are drafted in a row."""


@dataclass(frozen=True, slots=True)
class AcceptLength:
    """Tokens per verifying pass, the one that the pass gives anyway included. `by_depth` has for each depth the share
    of passes in which the draft at that depth was accepted.
    """

    length: float
    by_depth: tuple[float, ...]
    passes: int

    def to_json(self) -> dict[str, object]:
        """Return plain values, of which `from_json` makes the same."""
        return {"length": self.length, "by_depth": list(self.by_depth), "passes": self.passes}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> AcceptLength:
        return cls(found["length"], tuple(found["by_depth"]), found["passes"])

    def __str__(self) -> str:
        depths = ", ".join(f"{share:.3f}" for share in self.by_depth)
        return f"accept length {self.length:.3f} (accepted at each depth: {depths}; {self.passes} passes)"


@torch.no_grad()
def by_states(
    draft: Draft,
    sequences: Iterable[StoredStates],
    batches: Batches,
    vocabulary: Vocabulary,
    *,
    chain: int = CHAIN,
    bf16: bool = False,
) -> AcceptLength:
    """Return what a chain of drafts would gain on sequences that the model has answered greedily.

    The same as drafting from one boundary to the next: up to the first wrong draft, drafts are the tokens of the
    answer, so that `Draft.steps` over the answer has computed them all.
    """
    passes = gained = 0
    accepted = [0] * chain
    for stored in sequences:
        if not stored.entries:
            continue
        one = stored.load()
        batch = batches.make([one])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            drafts = [draft.logits(states).argmax(-1) for states in draft.steps(batch.pack, chain)]
        right = [vocabulary.ids[one_step] == one.ids[2:] for one_step in drafts]
        found, sequence_accepted = _walk(right, one.prompt - 1, one.entries)
        passes += found
        gained += one.ids.shape[0] - 1 - one.prompt
        accepted = [old + new for old, new in zip(accepted, sequence_accepted, strict=True)]
    if not passes:
        return AcceptLength(1.0, (0.0,) * chain, 0)
    return AcceptLength(gained / passes, tuple(one / passes for one in accepted), passes)


def _walk(right: Sequence[torch.Tensor], at: int, entries: int) -> tuple[int, list[int]]:
    """Go through an answer pass by pass, from entry `at`: step j of the pass at entry i is `right[j][i + j]`. Return
    how many passes that takes, and how often each step was right with all before it.
    """
    hits = [one.tolist() for one in right]
    passes, accepted = 0, [0] * len(right)
    while at < entries:
        depth = 0
        while depth < len(hits) and at + depth < entries and hits[depth][at + depth]:
            accepted[depth] += 1
            depth += 1
        passes += 1
        at += depth + 1
    return passes, accepted
