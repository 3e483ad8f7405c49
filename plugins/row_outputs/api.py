"""Contract: from hidden states to one vector per prompt."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PoolerContext:
    """The prepared model's directory, whose files may say how it pools, and the width of its hidden states."""

    directory: Path
    hidden_size: int


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """Tokens [start, start + count) of one prompt of `length` tokens, which one step computes."""

    start: int
    count: int
    length: int


class Pooler(abc.ABC, Generic[OptionsT]):
    """Pools a prompt that may be computed in several chunks: `reduce` on the device, chunk by chunk, `combine` on the
    host at its end.
    """

    def __init__(self, options: OptionsT, ctx: PoolerContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: PoolerContext) -> str | None:
        """Return None, or the reason why the model is not pooled so. Asked where the config says `auto`."""
        return None

    @abc.abstractmethod
    def rows(self, span: PoolSpan) -> range:
        """Return positions within `span` whose hidden states it needs, as offsets from `span.start`; often none."""

    @abc.abstractmethod
    def first(self, length: int) -> int:
        """Return the first position of a prompt of this length whose hidden state it needs: what is cached before it
        need not be computed again.
        """

    @abc.abstractmethod
    def reduce(self, hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        """Return one partial result float32 [len(spans), hidden] per span from the hidden states of `rows` of all of
        them, one after the other, [rows, hidden], after the final norm. Every span has rows.
        """

    @abc.abstractmethod
    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        """Return the vector float32 [hidden] of a prompt of `length` tokens from its partial results, in order."""
