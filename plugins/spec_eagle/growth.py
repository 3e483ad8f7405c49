"""Growing trees: what a head drafts, level by level (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pegboard.plugins.spec_eagle.entries import Int64s, Memory, on
from pegboard.plugins.spec_eagle.selection import best_tree
from pegboard.toolkit.sampling.tree import chains

if TYPE_CHECKING:
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.plugins.spec_eagle.network import DraftNetwork


@dataclass(slots=True)
class _Level:
    """Drafted tokens that are gone on from: `tokens` int64, `scores` float32 and `bits` int64 [requests, topk], the
    head's `states` before them [requests, topk, hidden], and their places among the candidates int64 [requests, topk].
    """

    tokens: Tensor
    scores: Tensor
    states: Tensor
    bits: Tensor
    candidates: Tensor


@dataclass(frozen=True, slots=True)
class Growth:
    """What grows trees for some requests: their `rows` and how many tokens of each are `computed`, int64 [requests].
    The newest tokens stand behind those, and drafted ones in the slots behind the newest, in the order of drafting.
    """

    network: DraftNetwork
    embed: Callable[[Tensor], Tensor]
    ids: Tensor | None
    memory: Memory
    rows: Int64s
    computed: Int64s

    def trees(self, outputs: Tensor, newest: Int64s, most: Int64s, topk: int, steps: int) -> list[TokenTrees]:
        """Return a tree of at most `most` int64 [requests] nodes for each request, `steps` deep at most. `outputs`
        [requests, hidden] are those of the newest tokens' entries.
        """
        if topk == 1:
            return self._chains(outputs, newest, most, steps)
        first = self._first(outputs, topk)
        tokens, scores, parents = [first.tokens], [first.scores], [torch.full_like(first.tokens, -1)]
        level = first
        for step in range(1, steps):
            level, children = self._next(level, step, topk)
            tokens.append(children.tokens)
            scores.append(children.scores)
            parents.append(children.candidates)
        host = [torch.cat(one, dim=1).cpu().numpy() for one in (tokens, parents, scores)]
        rows = zip(newest.tolist(), *host, most.tolist(), strict=True)
        return [best_tree(root, found, above, scored, nodes) for root, found, above, scored, nodes in rows]

    # ---- chains ---------------------------------------------------------------------------------------------------

    def _chains(self, outputs: Tensor, newest: Int64s, most: Int64s, steps: int) -> list[TokenTrees]:
        drafted = []
        for step in range(steps):
            tokens = self._named(self.network.logits(outputs).argmax(dim=1))
            drafted.append(tokens)
            if step < steps - 1:
                outputs = self._go_on(tokens, self.network.states(outputs), step + 1, 1, None)
        found = torch.stack(drafted, dim=1).cpu().numpy()
        rows = zip(newest.tolist(), found, most.tolist(), strict=True)
        return [chains([(root, tokens[: nodes - 1])]) for root, tokens, nodes in rows]

    # ---- trees ----------------------------------------------------------------------------------------------------

    def _first(self, outputs: Tensor, topk: int) -> _Level:
        """Return the children of the newest tokens."""
        scores, tokens = self._best(outputs, topk)
        own = torch.arange(topk, device=outputs.device)
        states = self.network.states(outputs)[:, None].expand(-1, topk, -1)
        return _Level(tokens, scores, states, (torch.ones_like(own) << own).expand_as(tokens), own.expand_as(tokens))

    def _next(self, level: _Level, step: int, topk: int) -> tuple[_Level, _Level]:
        """Go on from a level. Return the best `topk` of what follows it; and all of it, with the places of the parents
        as `candidates`.
        """
        count, hidden = len(self.rows), level.states.shape[2]
        outputs = self._go_on(
            level.tokens.reshape(-1), level.states.reshape(-1, hidden), step, topk, level.bits.reshape(-1)
        )
        scores, tokens = self._best(outputs, topk)
        scores = (scores.view(count, topk, topk) + level.scores[:, :, None]).view(count, -1)
        tokens = tokens.view(count, -1)
        states = self.network.states(outputs).view(count, topk, hidden)
        parents = level.candidates.repeat_interleave(topk, dim=1)
        children = _Level(tokens, scores, states, level.bits, parents)
        kept, chosen = scores.topk(topk, dim=1)
        above = chosen // topk
        place = torch.arange(topk, device=chosen.device) + step * topk
        return _Level(
            tokens=tokens.gather(1, chosen),
            scores=kept,
            states=states.gather(1, above[:, :, None].expand(-1, -1, hidden)),
            bits=level.bits.gather(1, above) | (torch.ones_like(place) << place),
            candidates=chosen + topk + (step - 1) * topk**2,
        ), children

    def _best(self, outputs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities float32 and ids int64 [n, topk] of the best that follow outputs [n, hidden]."""
        logprobs = self.network.logits(outputs).log_softmax(dim=1)
        scores, tokens = logprobs.topk(topk, dim=1)
        return scores, self._named(tokens)

    # ---- both -----------------------------------------------------------------------------------------------------

    def _named(self, tokens: Tensor) -> Tensor:
        """Return the model's ids of the draft vocabulary's."""
        return tokens if self.ids is None else self.ids[tokens]

    def _go_on(self, tokens: Tensor, states: Tensor, step: int, width: int, bits: Tensor | None) -> Tensor:
        """Return the outputs [n, hidden] of drafted tokens int64 [n], `width` for each request and `step` deep, given
        the `states` before them. Their entries go to the slots behind those of earlier levels.
        """
        count = len(self.rows)
        written = np.full(count, step * width)
        tails = None if bits is None else (written, bits)
        new = np.full(count, width)
        batch = self.memory.batch(self.rows, self.computed + written, new, tokens, tails)
        # By depth, not by slot: entry `computed` - 1 is the newest token's.
        positions = on(tokens.device, np.repeat(self.computed - 1 + step, width))
        out: Tensor = self.network(self.embed(tokens), states, positions, batch)
        return out
