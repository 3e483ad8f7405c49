"""The model of the suite of speculators that draft on the device. It has no network: its states are a function of the
tokens up to theirs, written out, so that the same context gives the same bits however it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.layers import KVGroupSpec, KVKind, LayerSpec, ModelSpec
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.model_runner import ModelEnds
from pegboard.plugins.speculation.api import SpeculatorContext
from pegboard.plugins.speculation.suite.checks import VOCAB, Int64s

HIDDEN, LAYERS = 16, 4
"""Sizes of the suite's model."""

_LAYERS = tuple(LayerSpec(number, 2, 2, 8, 8, 8**-0.5) for number in range(LAYERS))
SPEC = ModelSpec(
    "suite", VOCAB, HIDDEN, 65536, _LAYERS, (KVGroupSpec(KVKind.FULL, tuple(range(LAYERS))),), frozenset({2})
)


def toy_context(max_nodes: int, rows: int, vocab: int = VOCAB) -> SpeculatorContext:
    """Return what a speculator for this model is built from, or for one with another vocabulary."""
    model = ModelContext(Path(), {}, torch.float32, torch.device("cpu"))
    return SpeculatorContext(replace(SPEC, vocab_size=vocab), max_nodes, model, rows)


class ToyModel:
    """A model's states, embedding and head, of random numbers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.table = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
        self._now, self._before = rng.normal(size=(2, LAYERS + 1, VOCAB, HIDDEN)).astype(np.float32)
        self._head = torch.from_numpy(rng.normal(size=(HIDDEN, VOCAB)).astype(np.float32))

    def states(self, context: Int64s, place: int) -> NDArray[np.float32]:
        """Return [tokens, hidden] at a place, see `Taps`: of a token, of the one before, and of all up to it."""
        found: NDArray[np.float32]
        if place == 0:
            found = self.table[context]
            return found
        if place > LAYERS:
            last = self.states(context, LAYERS)
            found = last / np.sqrt((last**2).mean(axis=1, keepdims=True))
            return found
        now = self._now[place][context]
        before = np.concatenate([np.zeros((1, HIDDEN), np.float32), self._before[place][context[:-1]]])
        roots = np.sqrt(np.arange(1, len(context) + 1, dtype=np.float32))
        found = now + before + np.cumsum(now - before, axis=0, dtype=np.float32) / roots[:, None]
        return found

    def taps(self, context: Int64s, places: Sequence[int], start: int) -> NDArray[np.float32]:
        """Return [tokens, places x hidden] of the tokens from `start` on."""
        none = np.empty((len(context), 0), np.float32)
        return np.concatenate([none, *(self.states(context, place) for place in places)], axis=1)[start:]

    def ends(self) -> ModelEnds:
        table = torch.from_numpy(self.table)
        return ModelEnds(lambda ids: table[ids], lambda states: states @ self._head)
