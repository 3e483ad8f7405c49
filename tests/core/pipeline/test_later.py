"""Control actions that answer in a later turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import ControlReply, ControlRequest, FromScheduler
from tests.core.pipeline.harness import Harness, oracle


class Counting:
    """Answers at the third question, or raises then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self._error = error

    def poll(self) -> dict[str, object] | None:
        self.asked += 1
        if self.asked < 3:
            return None
        if self._error is not None:
            raise self._error
        return {"asked": self.asked}


def turns(harness: Harness, call: ControlRequest) -> Iterator[list[FromScheduler]]:
    """Yield what each turn of the loop answers, beginning with that of the call."""
    yield harness.scheduler.receive([call])
    while True:
        harness.step()
        yield harness.scheduler.receive([])


def test_requests_go_on_until_it_answers() -> None:
    """It is asked once a turn, and an engine with nothing else to do does not go to sleep."""
    harness, later = Harness(), Counting()
    harness.scheduler.controls["later"] = lambda args: later
    harness.submit("a", [1, 2, 3], 8, sampling={"ignore_eos": True})
    turn = turns(harness, ControlRequest(call_id=7, action="later"))
    assert [next(turn), next(turn)] == [[], []]
    assert later.asked == 2
    assert not harness.scheduler.idle
    assert next(turn) == [ControlReply(call_id=7, ok=True, payload={"asked": 3})]
    assert next(turn) == []
    harness.run()
    assert later.asked == 3
    assert harness.tokens("a") == oracle([1, 2, 3], 8, ignore_eos=True)
    assert harness.scheduler.idle


def test_an_idle_engine_stays_awake_and_others_are_answered() -> None:
    harness, first, second = Harness(), Counting(), Counting()
    harness.scheduler.controls["first"] = lambda args: first
    harness.scheduler.controls["second"] = lambda args: second
    turn = turns(harness, ControlRequest(call_id=1, action="first"))
    assert next(turn) == []
    (info,) = harness.scheduler.receive([ControlRequest(call_id=2, action="info")])
    assert isinstance(info, ControlReply)
    assert (info.call_id, info.ok) == (2, True)
    assert harness.scheduler.receive([ControlRequest(call_id=3, action="second")]) == [
        ControlReply(call_id=1, ok=True, payload={"asked": 3})
    ]
    assert not harness.scheduler.idle
    assert next(turn) == []
    assert next(turn) == [ControlReply(call_id=3, ok=True, payload={"asked": 3})]
    assert harness.scheduler.idle


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(InvalidRequest("no", status=409, code="busy"), 409, "busy"), (ValueError("odd"), 500, "control_failed")],
)
def test_what_it_raises_is_its_answer(error: Exception, status: int, code: str) -> None:
    harness = Harness()
    harness.scheduler.controls["later"] = lambda args: Counting(error)
    turn = turns(harness, ControlRequest(call_id=1, action="later"))
    assert [next(turn), next(turn)] == [[], []]
    (reply,) = next(turn)
    assert isinstance(reply, ControlReply)
    assert (reply.ok, reply.payload["status"], reply.payload["code"]) == (False, status, code)
    with pytest.raises(InvalidRequest, match=r"no|odd") as raised:
        reply.check("later")
    assert raised.value.status == status
    assert next(turn) == []
    assert harness.scheduler.idle
