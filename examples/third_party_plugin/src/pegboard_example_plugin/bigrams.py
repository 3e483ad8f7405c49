"""Drafts without a model: what came after the newest two tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pegboard.core.interfaces import TokenTrees
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.toolkit.sampling.tree import chains

from pegboard_example_plugin.options import BigramsOptions


@dataclass
class Notes:
    """Of one request, what followed each two tokens last, and how many tokens have been read."""

    after: dict[tuple[int, int], int] = field(default_factory=dict)
    read: int = 0


class Bigrams(Speculator[BigramsOptions]):
    """Goes on from the newest two tokens, one by one, with what followed them last."""

    def __init__(self, options: BigramsOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.max_nodes = min(options.nodes, ctx.max_nodes)

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        return chains((int(row.tokens[-1]), self._draft(row)) for row in rows)

    def _draft(self, row: DraftRow) -> list[int]:
        # Notes of a request live in its memo, under the speculator itself, and a step adds what is new: to go
        # through the whole text at each step would hold back every request.
        notes: Notes = row.memo.setdefault(self, Notes())
        new = row.tokens[max(0, notes.read - 2) :].tolist()
        notes.after.update(zip(zip(new, new[1:], strict=False), new[2:], strict=False))
        notes.read = len(row.tokens)
        text, nodes = new[-2:], min(row.most, self.max_nodes)
        while len(text) > 1 and len(text) - 1 < nodes:
            token = notes.after.get((text[-2], text[-1]))
            # In a prompt, numbers beyond the vocabulary stand for pictures.
            if token is None or token >= self.ctx.spec.vocab_size:
                break
            text.append(token)
        return text[2:]
