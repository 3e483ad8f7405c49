"""How a leader learns that a follower is lost, though it is sending to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.plugins.parallel import group as module
from pegboard.plugins.parallel.api import RankHandle
from pegboard.plugins.parallel.group import Group, GroupLost, Member
from pegboard.plugins.parallel.leader import Leader
from pegboard.plugins.parallel.messages import Failed, Like, Link, encode
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


class Meeting(Leader):
    """Has one rank, which `meets` this one, or does not."""

    def __init__(self, group: Group, meets: Callable[[], None]) -> None:
        parts: Any = SimpleNamespace(connect=lambda meeting, timeout: meets(), address=None)
        self._group, self._timeout, self._axes, self._launcher = group, 60.0, parts, parts

    def meet(self) -> None:
        local: Any = None
        self.lead(local, 1, (1, 1))


@pytest.fixture
def meeting(pair: tuple[socket.socket, socket.socket]) -> Iterator[Group]:
    group = Group(timeout=60.0)
    group.members.append(Member(1, Link(pair[0]), Stopped(pair[1]), done={"come", "start"}))
    group.watch()
    yield group
    group.close()


def test_a_rank_that_dies_while_ranks_meet_is_the_reason(
    meeting: Group, pair: tuple[socket.socket, socket.socket]
) -> None:
    """And not that the communicator has waited in vain."""

    def meets() -> None:
        Link(pair[1]).send(encode(Failed("RuntimeError: a drill")))
        raise PegboardError("the ranks did not meet")

    with pytest.raises(GroupLost, match="failed: RuntimeError: a drill"):
        Meeting(meeting, meets).meet()


def test_nothing_waits_for_a_rank_that_has_died(meeting: Group, pair: tuple[socket.socket, socket.socket]) -> None:
    """Though the communicator would wait until its own time is up."""
    released = threading.Event()

    def meets() -> None:
        pair[1].shutdown(socket.SHUT_RDWR)
        assert released.wait(SECONDS)

    with pytest.raises(GroupLost, match="closed its connection"):
        Meeting(meeting, meets).meet()
    assert not released.is_set()
    released.set()


def test_ranks_that_do_not_meet_though_all_are_there(meeting: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.1)

    def meets() -> None:
        raise PegboardError("the ranks did not meet")

    with pytest.raises(PegboardError, match="the ranks did not meet") as caught:
        Meeting(meeting, meets).meet()
    assert not isinstance(caught.value, GroupLost)


@pytest.mark.parametrize(
    ("said", "temporary"),
    [
        (None, True),
        (Failed("ModelError: no such file"), False),
        (Failed("Temporary: the cluster is full", temporary=True), True),
        (Like({"versions": "another"}), False),
    ],
    ids=["it ended", "it cannot", "it could not", "it differs"],
)
def test_whether_another_start_may_help(
    said: Failed | Like | None, temporary: bool, meeting: Group, pair: tuple[socket.socket, socket.socket]
) -> None:
    """It decides on the exit code: 1 where a supervisor should try again."""
    if said is None:
        pair[1].shutdown(socket.SHUT_RDWR)
    else:
        Link(pair[1]).send(encode(said))
    with pytest.raises(GroupLost) as caught:
        meeting.wait_for("load")
    assert isinstance(caught.value, Temporary) == temporary
