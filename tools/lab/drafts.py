"""Drafts in the lab: a speculator that is right as often as it is told to be, at each depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.trees import MAX_NODES, TokenTrees
from pegboard.plugins.speculation import SPECULATOR
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.plugins.speculation.options import SpeculationSection
from pegboard.plugins.speculation.stage import Speculation
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.interfaces.clock import Clock

DRAFTED = 9
"""What every draft says; nothing reads it."""


def parse_rates(text: str) -> tuple[float, ...]:
    """Return how likely a draft at each depth is accepted, given those before it, from 0.8,0.6,0.5. Raises
    ConfigError.
    """
    try:
        rates = tuple(float(one) for one in text.split(","))
    except ValueError:
        rates = ()
    if not 0 < len(rates) < MAX_NODES or not all(0 <= one <= 1 for one in rates):
        raise ConfigError(f"--accept: {text!r} are not 1 to {MAX_NODES - 1} numbers from 0 to 1, with commas between")
    return rates


class RatedSpeculator(Speculator):
    """Drafts a chain of as many tokens as it has rates, if it may."""

    def __init__(self, rates: Sequence[float], vocab_size: int) -> None:
        super().__init__(None, SpeculatorContext(ModelSpec("lab", vocab_size, 0, 0, (), ()), len(rates) + 1))
        self.max_nodes = len(rates) + 1

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        return tree.chains((int(row.tokens[-1]), [DRAFTED] * (min(row.most, self.max_nodes) - 1)) for row in rows)


def speculation_of(resolved: ResolvedConfig, rates: Sequence[float], vocab_size: int, clock: Clock) -> Speculation:
    """Return the stage that drafts with a RatedSpeculator, as the config bounds it."""
    settings = getattr(resolved.engine, SPECULATOR.config_path, SpeculationSection())
    speculator = RatedSpeculator(rates, vocab_size)
    return Speculation(speculator, settings, vocab_size, lambda speculator: None, clock=clock)


def accept(
    trees: TokenTrees, tokens: NDArray[np.int64], rates: Sequence[float], random: np.random.Generator
) -> NDArray[np.int64]:
    """Return what is drawn at each node, int64 [nodes], from the `tokens` that are drawn where drafts are wrong."""
    depths = tree.depths(trees)
    last = np.append(depths[1:] == 0, True)
    right = random.random(tokens.shape[0]) < np.append(rates, 0.0)[np.minimum(depths, len(rates))]
    return np.where(right & ~last, DRAFTED, tokens)
