"""Sections: consecutive layers of a decoder that ranks of their own compute, one section after another (pipeline
parallel: Huang et al. 2019, GPipe).

The first section has the embeddings and the head. Each section but the last sends its residual stream to the next one;
the last one sends what comes after the final norm back to the first, for those tokens whose states are wanted there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from pegboard.core.interfaces.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.core.interfaces.forward import ForwardBatch


class Channels(Protocol):
    """What goes from one section to another, by their numbers."""

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor. May wait until it is received."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Return the tensor that comes next from `source`, of the shape and type of x, which is overwritten."""


class Sections:
    """Section `index` of `count`. `layers` has the number of layers of each; none: they are divided by bytes. What
    sections send each other needs `connect` first.
    """

    def __init__(self, count: int = 1, index: int = 0, layers: Sequence[int] = ()) -> None:
        self.count = count
        self.index = index
        self.layers = tuple(layers)
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Stands around the wait of the first section for the last one."""
        self._channels: Channels | None = None

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def connect(self, channels: Channels) -> None:
        """Take what leads to the other sections from here on."""
        self._channels = channels

    @property
    def _connected(self) -> Channels:
        if self._channels is None:
            raise RuntimeError(f"section {self.index} of {self.count} is not connected to the others")
        return self._channels

    def own(self, layer_bytes: Sequence[int], end_bytes: int) -> range:
        """Return the layers of this section, given the bytes of each layer of the model, and those of embeddings and
        head. Raises ModelError where a section would be without layers, or `layers` are not those of the model.
        """
        total = len(layer_bytes)
        if self.count > total:
            raise ModelError(
                f"parallel.pipeline: {total} layers do not make {self.count} sections; it may be at most {total}"
            )
        counts = self.layers or divided(layer_bytes, end_bytes, self.count)
        if len(counts) != self.count or sum(counts) != total or min(counts) < 1:
            raise ModelError(
                f"parallel.layers: {list(counts)}, but {total} layers are to be divided among {self.count} sections "
                "(parallel.pipeline), at least one for each"
            )
        start = sum(counts[: self.index])
        return range(start, start + counts[self.index])

    def receive(self, like: Tensor) -> Tensor:
        """Return the residual stream of the section before, of the shape and type of `like`, which is overwritten."""
        return self._connected.receive(like, self.index - 1)

    def hand_on(self, states: Tensor, batch: ForwardBatch) -> Tensor:
        """Send on the states [tokens, hidden] with which this section ends: the residual stream, or, in the last
        section, what comes after the final norm. Return the latter in the first section, where only the wanted rows
        have a meaning. What the others return has none.
        """
        if self.count == 1:
            return states
        rows = wanted_rows(batch)
        if self.last:
            if rows is None or rows.shape[0]:
                self._connected.send(states if rows is None else states.index_select(0, rows), 0)
            return states
        self._connected.send(states, self.index + 1)
        if not self.first:
            return states
        if rows is not None and rows.shape[0] == 0:
            return torch.zeros_like(states)
        wanted = torch.empty_like(states) if rows is None else states.new_empty(rows.shape[0], states.shape[1])
        with self.waiting():
            wanted = self._connected.receive(wanted, self.count - 1)
        return wanted if rows is None else torch.zeros_like(states).index_copy_(0, rows, wanted)


def wanted_rows(batch: ForwardBatch) -> Tensor | None:
    """Return the packed tokens whose last hidden states are read, int64 [n], some perhaps twice; None: all of them."""
    if batch.logits_indices is None:
        return None
    some = (batch.logits_indices, batch.logprob_rows, batch.hidden_rows)
    return torch.cat([rows for rows in some if rows is not None])


def divided(layer_bytes: Sequence[int], end_bytes: int, count: int) -> list[int]:
    """Return how many layers each of `count` sections gets, at least one, so that their bytes are as even as possible:
    the sum of their squares is the least. The first section has `end_bytes` beside its layers.
    """
    total = len(layer_bytes)
    sums = [0, *itertools.accumulate(layer_bytes)]
    # For the first `made` sections with so many layers: the least sum of squares, and the layers of the last of them.
    best = {(1, layers): ((end_bytes + sums[layers]) ** 2, layers) for layers in range(1, total + 1)}
    for made in range(2, count + 1):
        for layers in range(made, total + 1):
            best[made, layers] = min(
                (best[made - 1, layers - own][0] + (sums[layers] - sums[layers - own]) ** 2, own)
                for own in range(1, layers - made + 2)
            )
    counts: list[int] = []
    for made in range(count, 0, -1):
        counts.insert(0, best[made, total - sum(counts)][1])
    return counts
