"""An EAGLE head that is told what the model will say: what drafting costs, at any rate of acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.plugin import Provider
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.spec_eagle.options import EagleOptions
from pegboard.plugins.spec_eagle.speculator import EagleSpeculator
from pegboard.plugins.speculation.api import DraftBatch, SpeculatorContext, Stands
from pegboard.toolkit.sampling.tree import chains


class InformedOptions(EagleOptions):
    """Options of the speculator `informed`."""

    hit_rate: float = 0.5
    """How likely each drafted token is the right one, if the ones before it are."""


class InformedEagle(EagleSpeculator):
    """Drafts a chain as the head does, and proposes recorded answers in its place."""

    answers: ClassVar[list[tuple[int, ...]]] = []
    """Prompts, each with its answer behind it."""

    def __init__(self, options: InformedOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.hit_rate = options.hit_rate
        self.tokens = np.zeros(2**20, np.int64)

    def observe(self, batch: ForwardBatch, taps: torch.Tensor, stands: Stands) -> None:
        super().observe(batch, taps, stands)
        ends = stands.starts + stands.counts
        ids = batch.input_ids.index_select(0, stands.tokens).numpy()
        table, rows, done = batch.kv_groups[0].row_table.numpy(), batch.req_pool_indices.tolist(), 0
        for row, start, end in zip(rows, stands.starts.tolist(), ends.tolist(), strict=True):
            self.tokens[table[row, start:end]] = ids[done : done + end - start]
            done += end - start

    def draft(self, batch: DraftBatch) -> TokenTrees:
        found = super().draft(batch)
        if not (found.counts > 1).any():
            return found
        table = batch.row_table.numpy()
        rows = zip(
            batch.rows.tolist(), batch.seq_lens.tolist(), batch.newest.tolist(), found.counts.tolist(), strict=True
        )
        return chains(
            (newest, self._recorded([*self.tokens[table[row, : length - 1]].tolist(), newest], count - 1))
            for row, length, newest, count in rows
        )

    def _recorded(self, context: Sequence[int], count: int) -> list[int]:
        chance = random.Random(f"{len(context)} {context[-1]}")
        for text in self.answers:
            if text[: len(context)] == tuple(context):
                right = text[len(context) : len(context) + count]
                return [token if chance.random() < self.hit_rate else token ^ 1 for token in right]
        return []


PROVIDER = Provider(
    contract="speculator",
    name="informed",
    factory=f"{__name__}:InformedEagle",
    config=f"{__name__}:InformedOptions",
    summary="an EAGLE head that is told the answers",
    provides=frozenset({"branches", "device"}),
    rank=-1,
)
