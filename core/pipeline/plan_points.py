"""PlanPoints: where stages take part in plans, as frozen tuples of those that override a method. A point without
listeners is one truth test.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.stage import Stage, Wait
from pegboard.core.pipeline.flags import FIRST_STAGE
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.system.culprits import Culprits
from pegboard.toolkit.system.taking_part import takes_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import BaseStep
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.core.pipeline.ahead import Room

logger = logging.getLogger(__name__)

MAX_STAGES = 48
"""As many bits are left in the flags of a request."""


class PlanPoints:
    """The stages of one scheduler, with a bit of `Req.flags` for each."""

    def __init__(self, stages: Sequence[Stage] = (), culprits: Culprits | None = None) -> None:
        self.stages = tuple(stages)
        names = [stage.name for stage in stages]
        if len(stages) > MAX_STAGES or len(set(names)) < len(names) or not all(names):
            raise ValueError(f"stages must have names of their own, and be {MAX_STAGES} at most: {', '.join(names)}")
        for number, stage in enumerate(stages):
            stage.flag = FIRST_STAGE << number
        self.culprits = culprits or Culprits()
        self.lookback = max((stage.lookback for stage in stages), default=0)
        self.beginning = self._at("begin_plan")
        self._skipping = self._at("skips")
        self._clipping = self._at("clip")
        self.clips = bool(self._clipping)
        """Whether some stage says how much of a prompt can be computed."""
        self._settling = self._at("must_settle")
        self.looking_ahead = self._at("ahead")
        """Stages that may have tokens ahead."""
        self._bounding = self._at("bound_ahead")

    def _at(self, point: str) -> tuple[Stage, ...]:
        """Return the stages that take part at a point."""
        return tuple(one for one in self.stages if takes_part(Stage, one, point))

    # ---- a plan ----------------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Tell that a step is about to be planned."""
        for stage in self.beginning:
            try:
                stage.begin_plan()
            except Exception as error:
                self._log(stage, "begin_plan", error)

    def skips(self, req: Req) -> bool:
        """Return whether some stage lets a request wait while others are admitted. One that raises does."""
        for stage in self._skipping:
            if req.flags & stage.flag:
                try:
                    if stage.skips(req):
                        return True
                except Exception as error:
                    self._log(stage, "skips", error)
                    return True
        return False

    def clips_for(self, req: Req) -> bool:
        """Return whether some stage says how much of a request's prompt can be computed."""
        return self.clips and any(req.flags & stage.flag for stage in self._clipping)

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        """Return how many of `take` tokens can be computed now, as far as stages say. One that raises lets the request
        wait.
        """
        for stage in self._clipping:
            if take <= 0 or not req.flags & stage.flag:
                continue
            try:
                found = stage.clip(req, start, take)
            except Exception as error:
                self._log(stage, "clip", error)
                return Wait.SKIP
            if isinstance(found, Wait):
                return found
            take = max(0, min(take, found))
        return take

    def must_settle(self, running: Sequence[Req], in_flight: BaseStep) -> bool:
        """Return whether some stage needs the results of the step under way first. One that raises does not."""
        for stage in self._settling:
            try:
                if stage.must_settle(running, in_flight):
                    return True
            except Exception as error:
                self._log(stage, "must_settle", error)
        return False

    def bound_ahead(self, reqs: Sequence[Req], flags: NDArray[np.int64], most: NDArray[np.int64]) -> None:
        """Lower `most` int64 [requests], the nodes that trees may have, to what stages say, which take part by the
        requests' `flags`. Where one raises, its requests have no tokens ahead.
        """
        for stage in self._bounding:
            places = np.flatnonzero((flags & stage.flag != 0) & (most > 1))
            if not places.shape[0]:
                continue
            try:
                found = stage.bound_ahead([reqs[place] for place in places.tolist()], most[places])
                most[places] = np.clip(found, 1, most[places])
            except Exception as error:
                self._log(stage, "bound_ahead", error)
                most[places] = 1

    def ahead(self, room: Room, vocab_size: int) -> tuple[Stage, TokenTrees] | None:
        """Return the first stage that brings some tokens ahead of requests, and these. One whose answer is of no use is
        left out.
        """
        for stage in self.looking_ahead:
            own = room.of(stage.flag)
            try:
                found = stage.ahead(own)
                if found is None or not (found.counts > 1).any():
                    continue
                wrong = tree.fault(found, own.newest, own.most, vocab_size)
            except Exception as error:
                self._log(stage, "ahead", error)
                continue
            if wrong is None:
                return stage, found
            self._log(stage, "ahead", ValueError(wrong))
        return None

    def ahead_cut(self, stage: Stage, seconds: float) -> None:
        """Tell a stage how long cutting what it has brought took."""
        try:
            stage.ahead_cut(seconds)
        except Exception as error:
            self._log(stage, "ahead_cut", error)

    # ---- what raises -----------------------------------------------------------------------------------------------

    def _log(self, stage: Stage, point: str, error: Exception) -> None:
        culprit = self.culprits.known(stage)
        self.culprits.count(culprit)
        logger.error("%s.%s raised", culprit or f"the stage {stage.name!r}", point, exc_info=error)
