"""Reports: what stages tell of themselves, for operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.stage import Stage

if TYPE_CHECKING:
    from pegboard.core.interfaces.ahead import LogPart


class Reports:
    """Asks the stages of one scheduler; `failed` is told of one that raises, which then tells nothing."""

    def __init__(self, stages: Sequence[Stage], failed: Callable[[Stage, str, Exception], None]) -> None:
        self._stages = tuple(stages)
        self._failed = failed

    def info(self) -> dict[str, Mapping[str, object]]:
        """Return what stages tell when the engine is built, by their names."""
        return {stage.name: found for stage in self._stages if (found := dict(stage.info()))}

    def figures(self) -> dict[str, float]:
        """Return totals and states of stages."""
        found: dict[str, float] = {}
        for stage in self._stages:
            try:
                found.update(stage.figures())
            except Exception as error:
                self._failed(stage, "figures", error)
        return found

    def log_totals(self) -> dict[str, tuple[str, int]]:
        """Return what stages add to the log line of a prefill."""
        found: dict[str, tuple[str, int]] = {}
        for stage in self._stages:
            try:
                found.update(stage.log_totals())
            except Exception as error:
                self._failed(stage, "log_totals", error)
        return found

    def log_decodes(self) -> list[LogPart]:
        """Return what stages add to a log line about decodes."""
        found: list[LogPart] = []
        for stage in self._stages:
            try:
                part = stage.log_decodes()
            except Exception as error:
                self._failed(stage, "log_decodes", error)
            else:
                found += [] if part is None else [part]
        return found

    def idle_error(self) -> str | None:
        """Return what is wrong with some stage's books, or None."""
        for stage in self._stages:
            try:
                if (error := stage.idle_error()) is not None:
                    return error
            except Exception as raised:
                self._failed(stage, "idle_error", raised)
        return None
