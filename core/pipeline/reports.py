"""Reports: what stages tell of themselves, for operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.stage import Stage

if TYPE_CHECKING:
    from pegboard.core.interfaces.ahead import LogPart

T = TypeVar("T")


class Reports:
    """Asks the stages of one scheduler; `failed` is told of one that raises, which then tells nothing."""

    def __init__(self, stages: Sequence[Stage], failed: Callable[[Stage, str, Exception], None]) -> None:
        self._stages = tuple(stages)
        self._failed = failed

    def info(self) -> dict[str, Mapping[str, object]]:
        """Return what stages tell when the engine is built, by their names."""
        return {stage.name: found for stage in self._stages if (found := dict(stage.info()))}

    def figures(self) -> dict[str, float]:
        """Return totals and states of all stages."""
        return flat(self.by_stage())

    def by_stage(self) -> dict[str, dict[str, float]]:
        """Return the same for each stage that tells any, by its name."""
        found = self._each("figures", lambda stage: (stage.name, dict(stage.figures())))
        return {name: told for name, told in found if told}

    def log_totals(self) -> dict[str, tuple[str, int]]:
        """Return what stages add to the log line of a prefill."""
        found = self._each("log_totals", lambda stage: stage.log_totals())
        return {name: total for told in found for name, total in told.items()}

    def log_decodes(self) -> list[LogPart]:
        """Return what stages add to a log line about decodes."""
        return [part for part in self._each("log_decodes", lambda stage: stage.log_decodes()) if part is not None]

    def idle_error(self) -> str | None:
        """Return what is wrong with some stage's books, or None."""
        return next((wrong for wrong in self._each("idle_error", lambda stage: stage.idle_error()) if wrong), None)

    def _each(self, what: str, ask: Callable[[Stage], T]) -> Iterator[T]:
        """Yield the answers of stages, in order, but of those that raise."""
        for stage in self._stages:
            try:
                told = ask(stage)
            except Exception as error:
                self._failed(stage, what, error)
            else:
                yield told


def flat(stages: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of all stages in one."""
    return {name: figure for told in stages.values() for name, figure in told.items()}
