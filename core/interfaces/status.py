"""The request status machine: one table, checked at every transition."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReqStatus(enum.Enum):
    """Where a request is: BLOCKED at the gate `Req.blocked_by`; HELD: its end is decided, and a gate still uses its KV
    or writes to it; FINISHED: all that it had is free.
    """

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    RETRACTED = "retracted"
    HELD = "held"
    FINISHED = "finished"


TRANSITIONS: dict[ReqStatus, frozenset[ReqStatus]] = {
    ReqStatus.WAITING: frozenset({ReqStatus.RUNNING, ReqStatus.BLOCKED, ReqStatus.FINISHED}),
    ReqStatus.BLOCKED: frozenset({ReqStatus.WAITING, ReqStatus.RUNNING, ReqStatus.HELD, ReqStatus.FINISHED}),
    ReqStatus.RUNNING: frozenset({ReqStatus.RETRACTED, ReqStatus.HELD, ReqStatus.FINISHED}),
    ReqStatus.RETRACTED: frozenset({ReqStatus.RUNNING, ReqStatus.FINISHED}),
    ReqStatus.HELD: frozenset({ReqStatus.FINISHED}),
    ReqStatus.FINISHED: frozenset(),
}


class FinishType(enum.Enum):
    """Why an output ended, under the names that the native API reports."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """`matched` is the stop token id or stop string that ended it; the rest belongs to an abort: `status` (HTTP), and
    where there are any, a short machine-readable `code` and the field of the request (`param`) that is to blame.
    """

    type: FinishType
    matched: int | str | None = None
    message: str = ""
    status: int = 0
    code: str = ""
    param: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return what is set, as plain values."""
        out: dict[str, object] = {"type": self.type.value}
        if self.matched is not None:
            out["matched"] = self.matched
        told = {"message": self.message, "status": self.status, "code": self.code, "param": self.param}
        return {**out, **{name: value for name, value in told.items() if value}}


class IllegalTransition(RuntimeError):
    """A status change that the table does not allow: a bug of the caller, never of the user."""


def check_transition(rid: str, old: ReqStatus, new: ReqStatus) -> None:
    """Raise IllegalTransition unless `old -> new` stands in the table."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(s.value for s in TRANSITIONS[old])) or "nothing"
        raise IllegalTransition(f"request {rid}: {old.value} -> {new.value} is not allowed (only to {allowed})")
