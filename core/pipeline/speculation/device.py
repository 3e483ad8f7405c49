"""DeviceDrafts: the part of a speculator that runs in the worker, on the model's device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.forward import Taps
from pegboard.core.interfaces.speculator import DraftBatch, Stands
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import DraftWork, ModelWorkerBatch
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.speculator import DeviceSpeculator
    from pegboard.core.interfaces.trees import Accepted, TokenTrees

ToDevice = Callable[["NDArray[Any]"], "torch.Tensor"]
"""Brings an array to the device."""

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""A speculator whose `observe` has failed this often in a row is not called any more."""


class DeviceDrafts:
    """Shows a speculator what the model computes, and asks it for drafts. Whatever it raises from `observe` costs its
    drafts alone: the tokens of that pass are drawn.
    """

    def __init__(self, speculator: DeviceSpeculator, name: str = "") -> None:
        self.name = name or type(speculator).__name__
        self.failures = 0
        """Of `observe`, since the start."""
        self._speculator = speculator
        self._in_a_row = 0

    @property
    def on(self) -> bool:
        """Whether the speculator is still shown what the model computes; its drafts are worth nothing otherwise."""
        return self._in_a_row < MAX_FAILURES

    def taps(self) -> Taps | None:
        """Return what collects the states of a pass; None where none are read."""
        return Taps(self._speculator.taps) if self.on and self._speculator.taps else None

    def observe(
        self,
        work: ModelWorkerBatch,
        batch: ForwardBatch,
        newest: torch.Tensor,
        accepted: Accepted | None,
        tensor: ToDevice,
    ) -> None:
        """Show it a pass that has sampled the tokens `newest` int64 [sampled]."""
        if not self.on:
            return
        try:
            states = newest.new_empty(batch.num_tokens, 0) if batch.taps is None else batch.taps.joined()
            self._speculator.observe(batch, states, stands_of(work, newest, accepted, tensor))
        except Exception:
            self._failed()
        else:
            self._in_a_row = 0

    def draft(self, work: DraftWork, row_table: torch.Tensor, kv_pool: KVPool) -> TokenTrees:
        """Ask for drafts. Raises what the speculator raises."""
        batch = DraftBatch(work.rows, work.seq_lens, work.newest, work.most, row_table, kv_pool)
        return self._speculator.draft(batch)

    def _failed(self) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row == 1 and worth_telling(self.failures):
            logger.exception("the speculator %r failed (observe): its drafts may be worse for it", self.name)
        if not self.on:
            logger.error("the speculator %r failed %d times in a row: it is off now", self.name, MAX_FAILURES)


def worth_telling(failures: int) -> bool:
    """Return whether the log should have this failure, of so many since the start: the 1st, 10th, 100th and so on. One
    that comes and goes would fill the log.
    """
    return str(failures).rstrip("0") == "1"


def stands_of(work: ModelWorkerBatch, newest: torch.Tensor, accepted: Accepted | None, tensor: ToDevice) -> Stands:
    """Return what stands of a pass: all of it, but for the drafts that were not accepted."""
    observed, ends = work.observed, np.cumsum(work.extend_lens)
    assert observed is not None
    counts, trees = work.extend_lens, work.trees
    if trees is None or accepted is None or work.sample_rows is None:
        tokens = np.arange(int(ends[-1]) if len(ends) else 0)
        last = ends - 1 if work.sample_rows is None else work.sample_rows
        sampled = np.searchsorted(ends, last, side="right")
    else:
        sampled = np.searchsorted(ends, work.sample_rows[tree.starts(trees.counts)], side="right")
        counts = counts.copy()
        counts[sampled] += accepted.counts - trees.counts
        # What is not a node stands, and of the nodes those that were accepted.
        stays = np.ones(work.input_ids.shape[0], np.bool_)
        stays[work.sample_rows] = False
        stays[work.sample_rows[accepted.nodes]] = True
        tokens = np.flatnonzero(stays)
    return Stands(
        rows=work.rows,
        starts=work.prefix_lens,
        counts=counts,
        tokens=tensor(tokens),
        fresh=observed.fresh,
        sampled=sampled,
        newest=newest,
        room=observed.slots[sampled] > (work.prefix_lens + counts)[sampled],
    )
