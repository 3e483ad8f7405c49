"""What the network tells the two sides, and what they ask of it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from pegboard.plugins.disagg.handshake import Peer
from pegboard.plugins.disagg.messages import AboutRooms


class Address(NamedTuple):
    """Where a prefill server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RoomState(enum.Enum):
    """Where a room is, by the names that SGLang uses, on both sides."""

    BOOTSTRAPPING = "Bootstrapping"
    WAITING = "WaitingForInput"
    TRANSFERRING = "Transferring"
    FAILED = "Failed"


def by_state(states: Iterable[RoomState]) -> dict[str, int]:
    """Return how many rooms are in each state that a room may still leave, under names for metrics."""
    found = Counter(states)
    return {f"rooms_{state.name.lower()}": found[state] for state in _OPEN}


_OPEN = (RoomState.BOOTSTRAPPING, RoomState.WAITING, RoomState.TRANSFERRING)


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection is through with its handshake. `link` numbers it; `address` is what was dialled, None for one that
    was accepted.
    """

    link: int
    address: Address | None
    peer: Peer


@dataclass(frozen=True, slots=True)
class Said:
    """A message has come over a connection."""

    link: int
    message: AboutRooms


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection has ended. Nothing more comes over it. `silent`: the other side has not answered to pings, and would
    not answer to another connection.
    """

    link: int
    reason: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """An address that was dialled could not be connected to."""

    address: Address
    reason: str
    status: int = 502
    code: str = "prefill_unreachable"


Event: TypeAlias = Opened | Said | Lost | Failed


class Network(Protocol):
    """Connections to the other servers. Nothing here blocks."""

    def dial(self, address: Address) -> None:
        """Have a connection opened, unless there is one or one is on its way: `Opened` or `Failed` tells of it."""

    def send(self, link: int, message: AboutRooms) -> None:
        """Send a message; into the void where the connection has ended."""

    def events(self) -> Sequence[Event]:
        """Return what has happened since the last call."""
