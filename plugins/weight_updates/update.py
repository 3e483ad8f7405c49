"""An update of the weights, from the check of what is offered to the first step with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.weight_updates.messages import (
    ASK_AGAIN,
    NAME,
    Check,
    Checked,
    Forget,
    Origin,
    Poll,
    Work,
    Write,
    Written,
)
from pegboard.toolkit.http.weight_version import BROKEN
from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    from pegboard.core.interfaces.engine_view import EngineView, PauseMode
    from pegboard.plugins.weight_updates.stage import WeightUpdates

logger = logging.getLogger(__name__)

_SLICE = 0.1
"""Seconds that weights are written for in one turn: aborts, control actions and signs of life wait no longer."""


@dataclass(frozen=True, slots=True)
class Order:
    """What an update is to do: which weights, what becomes of the requests that are there, and the new version. `whole`
    says why all tensors are needed although the caller has allowed `partial`; "": they are not.
    """

    check: Check
    mode: PauseMode
    version: str
    whole: str = ""


class Update:
    """Answers once it is through. `then` is called with where the weights came from, if all went well, and `over` in
    any case.
    """

    def __init__(
        self,
        stage: WeightUpdates,
        view: EngineView,
        order: Order,
        then: Callable[[Origin | None], None],
        over: Callable[[], None],
    ) -> None:
        self._stage = stage
        self._view = view
        self._order = order
        self._then = then
        self._over = over
        self._ask(order.check)
        self._order = replace(order, check=replace(order.check, tensors=None, announced=None))
        self._turns = self._run()

    def poll(self) -> dict[str, object] | None:
        try:
            next(self._turns)
        except StopIteration as end:
            answer: dict[str, object] = end.value
            return answer
        return None

    def _ask(self, work: Work) -> object:
        return self._stage.ask(work)

    def _run(self) -> Generator[None, None, dict[str, object]]:
        try:
            checked = yield from self._checked()
            began = time.monotonic()
            yield from self._written()
            self._stage.updated(self._order.version)
            self._then(checked.origin)
            self._view.resume(NAME)
            self._drop_prefixes()
        finally:
            self._over()
            self._ask(Forget())
        seconds, tensors = round(time.monotonic() - began, 3), checked.tensors
        logger.info("weights: %d tensors replaced in %.2f s, version %s", tensors, seconds, self._order.version)
        return {"weight_version": self._order.version, "tensors": tensors, "seconds": seconds}

    def _drop_prefixes(self) -> None:
        """Give back the memory of prefixes. They are not found any more, whether or not the cache raises."""
        try:
            self._view.drop_prefixes()
        except Exception:
            logger.exception("the prefix cache has failed to forget prefixes of the weights before")

    def _checked(self) -> Generator[None, None, Checked]:
        """Wait for the check. Raises InvalidRequest: nothing has changed."""
        pause = 0.0  # files are looked at quickly, a trainer may take minutes
        while True:
            found = self._ask(Poll())
            assert isinstance(found, Checked)
            if found.error:
                why = self._order.whole
                note = f" (all weights are needed, since {why})" if why else ""
                raise InvalidRequest(found.error + note, code="bad_weights", param="partial" if why else None)
            if found.done:
                return found
            yield
            # Asking waits for the step under way.
            again, pause = time.monotonic() + pause, min(ASK_AGAIN, 2 * pause + 0.001)
            while time.monotonic() < again:
                yield

    def _written(self) -> Generator[None, None, None]:
        """Stop steps and write, some tensors each turn. Raises InvalidRequest."""
        self._view.pause(self._order.mode, NAME)
        self._view.settle()
        while True:
            try:
                found = self._ask(Write(_SLICE))
            except Exception as error:
                found = Written(error=in_words(error))
            assert isinstance(found, Written)
            if found.error and not found.begun:
                if not self._stage.broken:
                    self._view.resume(NAME)
                raise InvalidRequest(found.error, code="bad_weights")
            if found.error:
                logger.error("weights: an update has failed while it was written: %s", found.error)
                self._stage.broke(found.error)
                raise InvalidRequest(self._stage.broken, code=BROKEN, status=500)
            if found.done:
                return
            yield
