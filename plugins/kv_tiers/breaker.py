"""Breaker: stops asking what fails, and tries it again after a rest."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock

logger = logging.getLogger(__name__)

REST_SECONDS = 30.0
FAILURES_IN_A_ROW = 3


class Breaker:
    """Whether something may be asked. It opens after some failures in a row, or one call that overran, for a rest; then
    one probe is admitted, and its outcome decides. Used by several threads.

    Failures are in a row for each kind of call: on a full disk what is looked for is found, and all writes fail.
    """

    def __init__(self, name: str, clock: Clock, rest: float = REST_SECONDS) -> None:
        self.failures = 0
        """Failures so far, calls that overran among them."""
        self.openings = 0
        self._name = name
        self._clock = clock
        self._rest = rest
        self._in_a_row = Counter[str]()
        self._until: float | None = None
        self._probing = False
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether nothing is asked, except by a probe."""
        return self._until is not None

    def admit(self) -> tuple[bool, bool]:
        """Return whether a newcomer may ask, and whether it is the probe. A probe ends with `succeeded`, `failed` or
        `give_back`.
        """
        with self._lock:
            if self._until is None:
                return True, False
            if self._probing or self._clock() < self._until:
                return False, False
            self._probing = True
            return True, True

    def may(self, probe: bool) -> bool:
        """Return whether one that was admitted may ask still, or again."""
        return self._until is None or probe

    def give_back(self) -> None:
        """Let another call be the probe: this one has ended without asking."""
        with self._lock:
            self._probing = False

    def succeeded(self, kind: str, probe: bool = False) -> None:
        with self._lock:
            self._in_a_row[kind] = 0
            if self._until is None or not probe:
                return
            self._until = None
            self._probing = False
        logger.info("%s works again", self._name)

    def failed(self, kind: str, reason: str, *, at_once: bool = False, probe: bool = False) -> bool:
        """Note a failure; whether it is to be left alone from now on. `at_once`: one is enough."""
        with self._lock:
            self.failures += 1
            self._in_a_row[kind] += 1
            if self._in_a_row[kind] == 1:
                logger.warning("%s: %s", self._name, reason)
            if self._until is not None and not probe:
                return False
            if not (at_once or probe or self._in_a_row[kind] >= FAILURES_IN_A_ROW):
                return False
            self._until = self._clock() + self._rest
            self._probing = False
            self.openings += 1
        logger.warning("%s is left alone for %g s: %s", self._name, self._rest, reason)
        return True
