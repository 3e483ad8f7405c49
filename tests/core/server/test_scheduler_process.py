"""The scheduler process's loop, on a scheduler and a wire that only take notes."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    FromScheduler,
    Shutdown,
    TokenOutput,
    TokenOutputs,
    ToScheduler,
)
from pegboard.core.server.scheduler_process import run
from pegboard.toolkit.system.watchdog import Watchdog


class Notes:
    """Wire and scheduler in one. Two steps after a message it is idle; the log shows the order of everything."""

    def __init__(self, *arrivals: list[ToScheduler]) -> None:
        self.arrivals = list(arrivals)
        self.log: list[str] = []
        self.sent: list[FromScheduler] = []
        self.left = 0

    @property
    def idle(self) -> bool:
        return self.left == 0

    @property
    def resting(self) -> bool:
        return False

    @property
    def busy(self) -> bool:
        return False

    def receive(self, given: int | list[ToScheduler] | None) -> list[ToScheduler] | list[FromScheduler]:  # both ends
        if isinstance(given, list):
            self.left += 2 * len(given)
            return [Accepted(rid="r")] if given else []  # type: ignore[return-value]
        self.log.append("sleep" if given is None else "look")
        if given == 0 and self.left:
            return []
        return self.arrivals.pop(0)

    def step(self) -> list[TokenOutput]:
        self.log.append("step")
        self.left = max(0, self.left - 1)
        return [TokenOutput(rid="r", token_ids=[1])]

    def send(self, messages: Iterable[FromScheduler]) -> None:
        self.sent.extend(messages)

    def send_outputs(self, outputs: list[TokenOutput]) -> list[str]:
        self.sent.append(TokenOutputs(outputs=outputs))
        return []


def test_sleeps_only_when_idle_and_ends_on_shutdown() -> None:
    notes = Notes([AbortRequest(rid="r")], [AbortRequest(rid="r"), Shutdown()])
    run(notes, notes, Watchdog(100.0))  # type: ignore[arg-type]
    assert notes.log == ["sleep", "step", "look", "step", "sleep"]


def test_replies_go_before_the_outputs_of_the_step() -> None:
    notes = Notes([AbortRequest(rid="r")], [Shutdown()])
    run(notes, notes, Watchdog(100.0))  # type: ignore[arg-type]
    assert isinstance(notes.sent[0], Accepted)
    assert all(isinstance(one, TokenOutputs) for one in notes.sent[1:])
    assert len(notes.sent) == 3
