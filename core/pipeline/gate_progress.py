"""Where requests stand with the admission gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.admission_gate import AdmissionGate, Verdict
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.status import FinishReason


@dataclass(slots=True)
class GateEvents:
    """What has changed since the last step: requests that have passed all gates, that failed, that are held no more."""

    ready: list[Req] = field(default_factory=list)
    failed: list[tuple[Req, FinishReason]] = field(default_factory=list)
    released: list[Req] = field(default_factory=list)


@dataclass(slots=True)
class GateEntry:
    """One gate under its name, with the requests that it blocks and holds, by rid."""

    name: str
    gate: AdmissionGate
    timeout: float | None
    hold_timeout: float | None
    blocked: dict[str, Req] = field(default_factory=dict)
    held: dict[str, Req] = field(default_factory=dict)
    failures: int = 0
    known: set[str] = field(default_factory=set)
    """Calls that have raised before, whose traceback is in the log."""

    def __post_init__(self) -> None:
        self.gate.name = self.name


@dataclass(slots=True)
class GateProgress:
    """A request on its way: the gates that concern it, how many of them it has passed, and where it stands, since when.
    `namespace` is the one that it came with, and `added` what gates have added to it, by their names. `quarantined`: it
    has ended, and its memory is still written to.
    """

    entries: list[GateEntry]
    passed: int
    since: float
    verdict: Verdict
    namespace: str
    added: dict[str, str] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)
    quarantined: bool = False
