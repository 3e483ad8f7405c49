"""The followers as their leader sees them: what they say, and that they are there."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.plugins.parallel.messages import (
    Close,
    Done,
    Failed,
    Like,
    Link,
    LinkError,
    Load,
    Ping,
    Room,
    Sync,
    Synced,
    encode,
    to_leader,
)
from pegboard.toolkit.system.last_words import end_process, say_last_words

if TYPE_CHECKING:
    from pegboard.plugins.parallel.api import RankHandle

logger = logging.getLogger(__name__)

PINGS = 4
"""A follower that has not answered so many pings in a row, sent over the time that it may be silent, is lost."""
COME_SECONDS = 120.0
"""How long a process may take to come that was started; it imports torch before it can answer."""
SYNC_SECONDS = 5.0
"""After an error on this rank: how long the others may take for the rest of the same batch."""
_END_SECONDS = 2.0
"""How long a process may take to end once its connection has: less than `SYNC_SECONDS`, so that its end is told, and
not that rank 0 could not go on without it."""
_CLOSE_SECONDS = 5.0
_LAST_SECONDS = 60.0
"""How long it takes at most until all followers are killed, and this process says why it ends."""


class GroupLost(PegboardError):
    """A rank is gone, so that no batch can be computed any more."""


class RankEnded(GroupLost, Temporary):
    """The same, where its process has ended or is silent, and it has not said that the next one would fail, too."""


@dataclass(slots=True)
class Member:
    """A follower, and what it has said: the phases of the start that are done, its room for KV, and the last Synced."""

    index: int
    link: Link
    handle: RankHandle
    done: set[str] = field(default_factory=set)
    num_pages: int | None = None
    synced: int = 0
    pings: int = 0

    @property
    def name(self) -> str:
        where = f" on {self.handle.host}" if self.handle.host else ""
        return f"rank {self.index} (process {self.handle.pid}{where})"


class Group:
    """All followers of one leader. A thread of its own listens to them; where one is lost, all are ended, and, once
    batches are being computed, this process as well: its own forward pass may wait for a rank that is gone.
    """

    def __init__(self, timeout: float, facts: Mapping[str, str] = MappingProxyType({})) -> None:
        """`facts` are those of rank 0, to which the others must be like (`FollowersContext`)."""
        self._facts = facts
        self.members: list[Member] = []
        self.lost: str | None = None
        self._temporary = False
        self.serving = False
        self._timeout = timeout
        self._heard = threading.Condition()
        self._closing = False
        self._ended = threading.Event()
        self._entered = 0
        self._wake_read, self._wake_write = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="ranks-watch", daemon=True)

    def watch(self) -> None:
        """Listen from now on."""
        self._watcher.start()

    def send(self, data: bytes, count: int | None = None) -> None:
        """Send a message to all, or to the first `count`. Raises GroupLost where one of them is gone."""
        self._check()
        for member in self.members[:count]:
            try:
                member.link.send(data)
            except OSError:
                # The watcher learns of it too, and why; it has the last word.
                self._wait(lambda: self.lost is not None, _LAST_SECONDS)
                self._lose(f"{member.name} does not take messages any more", temporary=True)
                self._check()

    def give_up(self, error: Exception) -> None:
        """Lose all ranks: they do not know a batch that this one knows."""
        self._lose(f"rank 0 could not send a batch to the others: {type(error).__name__}: {error}")

    def wait_for(self, phase: str) -> None:
        """Wait until all have done this phase of the start. Raises GroupLost for one that does not come to it."""
        self._wait(lambda: self.lost is not None or all(phase in member.done for member in self.members), None)
        self._check()

    def while_there(self, run: Callable[[], object]) -> None:
        """Run this in a thread of its own, and wait for it as long as all are there. Raises what it raises; and
        GroupLost, with the reason, where a rank is lost meanwhile, or within SYNC_SECONDS of an error, which that may
        have caused. The thread then goes on until what it waits for raises.
        """
        errors: list[BaseException] = []
        ended = threading.Event()

        def runs() -> None:
            try:
                run()
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()
                with self._heard:
                    self._heard.notify_all()

        self._check()
        threading.Thread(target=runs, name="ranks-meet", daemon=True).start()
        self._wait(lambda: self.lost is not None or ended.is_set(), None)
        if errors:
            self._wait(lambda: self.lost is not None, SYNC_SECONDS)
        self._check()
        if errors:
            raise errors[0]

    def room(self) -> int:
        """Wait until all have said for how many pages of KV they have memory; return the least. Raises GroupLost."""
        said: Callable[[], list[int]] = lambda: [one.num_pages for one in self.members if one.num_pages is not None]  # noqa: E731
        self._wait(lambda: self.lost is not None or len(said()) == len(self.members), None)
        self._check()
        return min(said())

    def within(self, number: int, run: Callable[[], object]) -> None:
        """Compute this rank's share of the batch with this number. Where that raises, see whether all others have come
        to the end of theirs: then only rank 0 had something left to do, and the group goes on.
        """
        self._check()
        if number != self._entered + 1:
            # The error of the batch before may not have been told yet: `failed` is called where its result is awaited.
            self._wait(lambda: self.lost is not None, SYNC_SECONDS)
            self._lose("rank 0 could not compute a batch that it had sent to the others")
            self._check()
        self._entered = number
        try:
            run()
        except Exception as error:
            if not self._computed(number):
                self._lose(f"rank 0 failed in a forward pass: {type(error).__name__}: {error}")
            raise

    def failed(self, number: int, error: Exception) -> None:
        """Lose all ranks where this one has failed before it began its share of the batch with this number."""
        if self._entered < number:
            self._lose(f"rank 0 failed before a forward pass: {type(error).__name__}: {error}")

    def _computed(self, number: int) -> bool:
        """Return whether all others come to the end of this batch."""

        def synced() -> bool:
            return all(member.synced == number for member in self.members)

        self.send(encode(Sync(number)))
        self._wait(lambda: self.lost is not None or synced(), min(SYNC_SECONDS, self._timeout))
        return self.lost is None and synced()

    def _wait(self, until: Callable[[], bool], seconds: float | None) -> None:
        with self._heard:
            self._heard.wait_for(until, seconds)

    def _check(self) -> None:
        if self.lost is None:
            return
        if self.serving and threading.current_thread() is not self._watcher:
            self._ended.wait(_LAST_SECONDS)  # this process ends with the reason, and not with what raises here
        raise (RankEnded if self._temporary else GroupLost)(self.lost)

    def healthy(self) -> bool:
        """Return whether all ranks are there. Once batches are being computed this does not return where one is lost:
        the process ends by the watcher, with the reason, and not by an error of the loop's without it.
        """
        try:
            self._check()
        except GroupLost:
            return False
        return True

    def close(self) -> None:
        """End all followers: those that are well are asked first."""
        self._closing = True
        self._ended.set()
        for member in self.members:
            if self.lost is None:
                with contextlib.suppress(OSError):  # gone already
                    member.link.send(encode(Close()))
        for member in self.members:
            if self.lost is None:
                member.handle.died(_CLOSE_SECONDS)
            _kill(member)
        os.write(self._wake_write, b"x")
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for member in self.members:
            member.link.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _lose(self, reason: str, *, temporary: bool = False) -> None:
        """Give the group up, for the first reason. Return once all have ended, if this process goes on. `temporary`:
        another start may mend it.
        """
        with self._heard:
            first = self.lost is None and not self._closing
            if first and self.serving:
                say_last_words(reason)  # before any thread can see that it is lost, and end this process without it
            if self.lost is None:
                self._temporary = temporary
                self.lost = reason  # others look at it first, and without the lock
            self._heard.notify_all()
        if not first:
            self._ended.wait()
            return
        logger.error("%s; all ranks end", reason)
        for member in self.members:
            _kill(member)
        if self.serving:
            end_process(reason)
        self._ended.set()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for member in self.members:
                selector.register(member.link.socket, selectors.EVENT_READ, member)
            while self.lost is None and not self._closing:
                found = selector.select(self._timeout / PINGS)
                for key, _ in found:
                    if isinstance(key.data, Member):
                        self._listen(key.data)
                if not found:
                    self._ping()

    def _listen(self, member: Member) -> None:
        try:
            frames = member.link.receive()
            if frames is None:
                raise EOFError
            for frame in frames:
                self._hear(member, frame)
        except (OSError, EOFError):
            how = member.handle.died(_END_SECONDS) or "closed its connection"
            self._lose(f"{member.name} {how}", temporary=True)
        except (LinkError, msgspec.DecodeError) as error:
            self._lose(f"{member.name} sent what is not a message: {error}")

    def _hear(self, member: Member, frame: bytes) -> None:
        message = to_leader.decode(frame)
        member.pings = 0
        if isinstance(message, Failed):
            self._lose(f"{member.name} failed: {message.error}", temporary=message.temporary)
            return
        if isinstance(message, Like):
            self._compare(member, message.facts)
            return
        with self._heard:
            if isinstance(message, Done):
                member.done.add(message.what)
            elif isinstance(message, Synced):
                member.synced = message.number
            elif isinstance(message, Room):
                member.num_pages = message.num_pages
            self._heard.notify_all()

    def _compare(self, member: Member, facts: Mapping[str, str]) -> None:
        """Let a rank read its weights, if it is like rank 0."""
        names = self._facts.keys() | facts.keys()
        other = sorted(name for name in names if self._facts.get(name) != facts.get(name))
        if other:
            shown = "; ".join(f"{name}: {facts.get(name)}, and on rank 0 {self._facts.get(name)}" for name in other)
            self._lose(f"{member.name} differs from rank 0 in {shown}")
            return
        with contextlib.suppress(OSError):  # the next turn sees the end of its stream
            member.link.send(encode(Load()))

    def _ping(self) -> None:
        for member in self.members:
            seconds = self._timeout if "come" in member.done else max(self._timeout, COME_SECONDS)
            if member.pings * self._timeout / PINGS >= seconds:
                self._lose(f"{member.name} has not answered for {seconds:g} s", temporary=True)
                return
            member.pings += 1
            with contextlib.suppress(OSError):  # the next turn sees the end of its stream
                member.link.try_send(encode(Ping()))


def _kill(member: Member) -> None:
    try:
        member.handle.kill()
    except Exception:  # the others are to end all the same
        logger.exception("%s does not end", member.name)
