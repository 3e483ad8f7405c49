"""How a leader learns that a follower is lost, though it is sending to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.core.interfaces.errors import PegboardError
from pegboard.plugins.parallel import group as module
from pegboard.plugins.parallel.api import RankHandle
from pegboard.plugins.parallel.group import Group, GroupLost, Member
from pegboard.plugins.parallel.leader import Leader
from pegboard.plugins.parallel.messages import Failed, Link, encode
from pegboard.toolkit.system.last_words import keep_last_words

LARGE = bytes(8 * 2**20)
"""More than a socket keeps."""
SECONDS = 30.0


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


class Slow(Stopped):
    """A process that takes until `released` to end."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.ending, self.released = threading.Event(), threading.Event()

    def kill(self) -> None:
        self.ending.set()
        assert self.released.wait(SECONDS)
        super().kill()


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process says why it ends, which it then does not."""
    monkeypatch.setattr(module, "end_process", lambda reason: None)
    keep_last_words(tmp_path / "words")
    yield tmp_path / "words"
    keep_last_words(None)


def test_the_reason_is_left_before_anything_else_happens(
    pair: tuple[socket.socket, socket.socket], words: Path
) -> None:
    """Whoever ends this process while ranks are still being killed, the reason is that rank's: a watchdog, or the
    loop, which asks whether the ranks are there after any error.
    """
    handle, group = Slow(pair[1]), Group(timeout=60.0)
    group.members.append(Member(1, Link(pair[0]), handle, done={"come"}))
    group.watch()
    group.serving = True
    Link(pair[1]).send(encode(Failed("RuntimeError: a drill")))
    assert handle.ending.wait(SECONDS)
    assert words.read_text() == "rank 1 (process 4711) failed: RuntimeError: a drill"
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(group.healthy()))
    asking.start()
    asking.join(0.2)
    assert not found, "the loop would end this process before the others have ended"
    handle.released.set()
    asking.join(SECONDS)
    assert found == [False]
    group.close()


def test_a_sender_leaves_the_reason_to_the_watcher(pair: tuple[socket.socket, socket.socket]) -> None:
    """A follower says why it fails and closes; the leader finds its socket closed before it has read that."""
    group = Group(timeout=60.0)
    group.members.append(Member(1, Link(pair[0]), Stopped(pair[1]), done={"come"}))
    Link(pair[1]).send(encode(Failed("RuntimeError: a drill")))
    pair[1].close()
    later = threading.Timer(2.5, group.watch)
    later.start()
    with pytest.raises(GroupLost, match="failed: RuntimeError: a drill"):
        group.send(b"x")
    later.join()
    group.close()


def test_an_error_before_a_pass_is_told_though_the_next_one_begins(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """With overlap the next batch is begun by a thread of its own before the loop has seen the error of this one."""
    group = Group(timeout=60.0)
    group.members.append(Member(1, Link(pair[0]), Stopped(pair[1]), done={"come"}))
    group.watch()
    later = threading.Timer(0.3, group.failed, (1, RuntimeError("the first")))
    later.start()
    with pytest.raises(GroupLost, match="rank 0 failed before a forward pass: RuntimeError: the first"):
        group.within(2, lambda: None)
    later.join()
    group.close()


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


def test_a_rank_that_dies_while_ranks_meet_is_the_reason(pair: tuple[socket.socket, socket.socket]) -> None:
    """And not that the communicator has waited in vain."""

    class Meeting(Leader):
        def __init__(self, group: Group) -> None:
            """Has one rank, which fails while this one waits for it."""
            parts: Any = SimpleNamespace(connect=self.wait, address=None)
            self._group, self._timeout, self._axes, self._launcher = group, 60.0, parts, parts

        def wait(self, meeting: Path, timeout: float) -> None:
            Link(pair[1]).send(encode(Failed("RuntimeError: a drill")))
            raise PegboardError("the ranks did not meet")

    group = Group(timeout=60.0)
    group.members.append(Member(1, Link(pair[0]), Stopped(pair[1]), done={"come", "start"}))
    group.watch()
    local: Any = None
    with pytest.raises(GroupLost, match="failed: RuntimeError: a drill"):
        Meeting(group).lead(local, 1, (1, 1))
    group.close()
