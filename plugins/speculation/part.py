"""Where batches run: what of the speculator works on the model's device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.ahead import Wants
from pegboard.core.interfaces.errors import ConfigError, Unsupported
from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.speculation.api import DraftBatch, Stands
from pegboard.plugins.speculation.checks import on_device
from pegboard.plugins.speculation.judging import Judge
from pegboard.plugins.speculation.messages import MAX_FAILURES, NAME, DraftWork, Pass, worth_telling
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from pegboard.core.interfaces.ahead import DeviceServices, LoadedModel, Verified
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.on_device import Bring
    from pegboard.core.interfaces.trees import Accepted
    from pegboard.plugins.speculation.api import Speculator

logger = logging.getLogger(__name__)


class SpeculationPart(DevicePart):
    """Shows a speculator what the model computes, asks it for drafts where it drafts on the device, and, where it
    `judges`, which drafts stand. Whatever it raises from `observe` costs its drafts alone: the tokens of that pass are
    drawn. `failed` counts its failures.
    """

    name = NAME

    def __init__(
        self, speculator: Speculator, failed: Callable[[object], None], *, name: str = "", judges: bool = False
    ) -> None:
        self._called = name or type(speculator).__name__
        self._failed = failed
        self._device = on_device(speculator)
        self._judge = Judge(speculator, failed, self._called) if judges else None
        self._failures = self._in_a_row = 0
        self._bring: Bring

    @property
    def on(self) -> bool:
        """Whether the speculator is still shown what the model computes; its drafts are worth nothing otherwise."""
        return self._in_a_row < MAX_FAILURES

    def attach(self, model: LoadedModel) -> None:
        """Read the weights, if there are any. Raises ModelError, and ConfigError for a model that cannot show what is
        needed of it.
        """
        self._bring = model.bring
        if self._device is None:
            return
        ends = model.ends()
        try:
            ends.embed(torch.zeros(1, dtype=torch.int64, device=model.device))
        except Unsupported as error:
            raise ConfigError(f"speculation.use: {self._called!r} cannot draft for this model: {error}") from error
        self._device.load(ends, model.attention)

    def numerics(self) -> str:
        return "" if self._device is None else self._device.numerics()

    def wants(self, payload: object) -> Wants:
        assert isinstance(payload, Pass)
        logits = payload.trees is not None and self._judge is not None and self._judge.on
        return Wants(logits, self._device.taps if self._device is not None and self.on else ())

    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        if self._judge is None or verified.logits is None or verified.sampling is None:
            return None
        return self._judge.accept(verified.trees, verified.drawn, verified.logits, verified.sampling, verified.rows)

    def computed(self, payload: object, batch: ForwardBatch, output: ForwardOutput) -> Mapping[str, torch.Tensor]:
        assert isinstance(payload, Pass)
        newest = output.newest
        if self._device is None or newest is None or not self.on:
            return {}
        try:
            taps = newest.new_empty(batch.num_tokens, 0) if batch.taps is None else batch.taps.joined(self._device.taps)
            self._device.observe(batch, taps, stands_of(payload, newest, output.accepted, self._bring))
        except Exception:
            self._observe_failed()
        else:
            self._in_a_row = 0
        return {}

    def run(self, payload: object, services: DeviceServices) -> object:
        """Return drafts, or False where the speculator is off. Raises what the speculator raises."""
        assert isinstance(payload, DraftWork)
        if self._device is None or not self.on:
            return False
        batch = DraftBatch(
            payload.rows, payload.seq_lens, payload.newest, payload.most, services.row_table, services.pool
        )
        return self._device.draft(batch)

    def _observe_failed(self) -> None:
        self._failed(self._device)
        self._failures += 1
        self._in_a_row += 1
        if self._in_a_row == 1 and worth_telling(self._failures):
            logger.exception("the speculator %r failed (observe): its drafts may be worse for it", self._called)
        if not self.on:
            logger.error("the speculator %r failed %d times in a row: it is off now", self._called, MAX_FAILURES)


def stands_of(work: Pass, newest: torch.Tensor, accepted: Accepted | None, bring: Bring) -> Stands:
    """Return what stands of a pass: all of it, but for the drafts that were not accepted."""
    ends = np.cumsum(work.counts)
    counts, trees = work.counts, work.trees
    if trees is None or accepted is None or work.logits_indices is None:
        tokens = np.arange(int(ends[-1]) if len(ends) else 0)
        last = ends - 1 if work.logits_indices is None else work.logits_indices
        sampled = np.searchsorted(ends, last, side="right")
    else:
        sampled = np.searchsorted(ends, work.logits_indices[tree.starts(trees.counts)], side="right")
        counts = counts.copy()
        counts[sampled] += accepted.counts - trees.counts
        # What is not a node stands, and of the nodes those that were accepted.
        stays = np.ones(int(ends[-1]), np.bool_)
        stays[work.logits_indices] = False
        stays[work.logits_indices[accepted.nodes]] = True
        tokens = np.flatnonzero(stays)
    return Stands(
        rows=work.rows,
        starts=work.starts,
        counts=counts,
        tokens=bring(tokens)[0],
        fresh=work.fresh,
        sampled=sampled,
        newest=newest,
        room=work.slots[sampled] > (work.starts + counts)[sampled],
    )
