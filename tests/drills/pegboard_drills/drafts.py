"""A speculator that knows what will be said, as well as it is told to, and misbehaves on purpose."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.trees import MAX_NODES, TokenTrees
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard_drills.lies import LIES, Tree, pack

if TYPE_CHECKING:
    from pegboard_drills.options import DrillSpeculatorOptions

_HIT, _WRONG, _SIZE, _PARENT, _PLACE = range(5)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the drill has of a request: a number that its prompt alone decides, and its output."""

    key: int
    output: Sequence[int]


def dice(*numbers: int) -> int:
    """Return 64 bits that look random, from integers alone: splitmix64's finaliser over each."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


_WORD = 2**64 - 1


class DrillSpeculator(Speculator["DrillSpeculatorOptions"]):
    """Drafts recorded outputs, each token right with `hit_rate`. What it drafts depends on the seed, the prompt and how
    much has been generated, so a request gets the same trees in any batch, and again when it is asked again.
    """

    def __init__(self, options: DrillSpeculatorOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.max_nodes = min(options.nodes, ctx.max_nodes)
        recorded = dict(options.outputs)
        if options.file is not None:
            recorded |= json.loads(Path(options.file).read_text("utf-8"))
        self._outputs = {tuple(map(int, prompt.split())): tuple(output) for prompt, output in recorded.items()}
        self._calls = 0

    @classmethod
    def supports(cls, options: DrillSpeculatorOptions, ctx: SpeculatorContext) -> str | None:
        return None if ctx.spec.vocab_size > MAX_NODES else "it needs more tokens than a node may have children"

    def concerns(self, params: SamplingParams) -> bool:
        if self.options.raises == "concerns":
            raise RuntimeError("the drill raises, as asked")
        return True

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        trees = [self._tree(row) for row in rows]
        self._calls += 1
        if self._calls % self.options.every:
            return pack(trees)
        if self.options.raises == "propose":
            raise RuntimeError("the drill raises, as asked")
        if self.options.slow:
            time.sleep(self.options.slow)
        told: TokenTrees = LIES[self.options.lies](trees, rows[-1].most if rows else 1, self.ctx.spec.vocab_size)
        return told

    def learn(self, rows: Sequence[DraftRow], offered: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        if self.options.raises == "learn":
            raise RuntimeError("the drill raises, as asked")

    def _tree(self, row: DraftRow) -> Tree:
        known: _Known | None = row.memo.get(self)
        if known is None:
            prompt = row.tokens[: row.input_len]
            output = self._outputs.get(tuple(prompt.tolist()), ())
            known = row.memo[self] = _Known(zlib.crc32(prompt.tobytes()), output)
        done = row.tokens.shape[0] - row.input_len
        most = min(self.max_nodes, row.most)
        if not self.options.noise:
            most = min(most, 1 + max(len(known.output) - done, 0))
        if self.options.ragged:
            most = 1 + self._roll(_SIZE, known.key, done) % most
        root = int(row.tokens[-1])
        if self.options.shape == "chain":
            drafts = [self._token(known, done + i, 0, self._hits(known, done + i)) for i in range(most - 1)]
            return Tree([root, *drafts], list(range(-1, most - 1)))
        return self._branching(root, known, done, most)

    def _branching(self, root: int, known: _Known, done: int, most: int) -> Tree:
        """Return a random tree. Among a right node's children one is right too, if that position is a hit."""
        parents = [-1]
        for node in range(1, most):
            thrown = self._roll(_PARENT, known.key, done, node)
            parents.append(node - 1 if thrown & 1 else (thrown >> 1) % node)
        tokens, depth = [root] * most, [0] * most
        right = 0  # the node down to which all is right; -1 below the end of it
        for node in range(most):
            children = [child for child in range(node + 1, most) if parents[child] == node]
            hit = children and node == right and self._hits(known, done + depth[node])
            chosen = children[self._roll(_PLACE, known.key, done, node) % len(children)] if hit else -1
            for place, child in enumerate(children):
                depth[child] = depth[node] + 1
                tokens[child] = self._token(known, done + depth[node], place, child == chosen)
            right = chosen if node == right else right
        return Tree(tokens, parents)

    def _hits(self, known: _Known, position: int) -> bool:
        if position >= len(known.output):
            return False
        return self._roll(_HIT, known.key, position) < self.options.hit_rate * 2**64

    def _token(self, known: _Known, position: int, place: int, right: bool) -> int:
        """Return the token that is said at a position, or a wrong one, another for each place among siblings."""
        size = self.ctx.spec.vocab_size
        said = known.output[position] if position < len(known.output) else 0
        if right:
            return said
        away = self._roll(_WRONG, known.key, position) + place
        return (said + 1 + away % (size - 1)) % size

    def _roll(self, *numbers: int) -> int:
        return dice(self.options.seed, *numbers)
