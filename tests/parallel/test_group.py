"""How a leader learns that a follower is lost, though it is sending to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pegboard.plugins.parallel.api import RankHandle
from pegboard.plugins.parallel.group import Group, GroupLost, Member
from pegboard.plugins.parallel.messages import Link

LARGE = bytes(8 * 2**20)
"""More than a socket keeps."""


class Stopped(RankHandle):
    """A process that does not read, and whose socket is closed with it."""

    def __init__(self, end: socket.socket, *, stays: bool = False) -> None:
        self.end, self.stays = end, stays

    @property
    def pid(self) -> int:
        return 4711

    def died(self, seconds: float) -> str | None:
        return None

    def kill(self) -> None:
        if self.stays:
            self.stays = False
            raise TimeoutError("it does not end")
        self.end.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_follower_that_takes_nothing_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    """Pings count, though a message is under way and cannot be sent."""
    group = Group(timeout=0.2)
    group.members.append(Member(1, Link(pair[0]), Stopped(pair[1]), done={"come"}))
    group.watch()
    with pytest.raises(GroupLost, match=r"rank 1 \(process 4711\) has not answered for 0.2 s"):
        group.send(LARGE)
    group.close()


def test_one_that_cannot_be_ended_keeps_no_other(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        group = Group(timeout=0.2)
        group.members += [
            Member(1, Link(pair[0]), Stopped(pair[1], stays=True), done={"come"}),
            Member(2, Link(ours), Stopped(theirs), done={"come"}),
        ]
        group.watch()
        with pytest.raises(GroupLost, match="has not answered"):
            group.wait_for("load")
        group.close()
        assert theirs.fileno() == -1, "the other one was ended"


def test_a_short_message_never_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    link = Link(pair[0])
    pair[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        link.send(LARGE)
    pair[0].setblocking(True)
    link.try_send(b"ping")
    pair[1].close()
    with pytest.raises(OSError, match=r"(?i)pipe|reset"):
        link.try_send(b"ping")
