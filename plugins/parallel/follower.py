"""A follower: computes what the leader sends, in that order, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import Temporary
from pegboard.plugins.parallel.api import Rendezvous
from pegboard.plugins.parallel.axes import THIS_RANK, ThisRank
from pegboard.plugins.parallel.delta import Decoder
from pegboard.plugins.parallel.lanes import FollowingLanes
from pegboard.plugins.parallel.messages import (
    Close,
    Done,
    Failed,
    GoOn,
    Like,
    Link,
    LinkError,
    Load,
    Measure,
    Meet,
    MeetMachines,
    Ping,
    Place,
    Pong,
    Room,
    Start,
    Step,
    Sync,
    Synced,
    Table,
    ToFollower,
    encode,
    to_follower,
)
from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.core.interfaces.followers import FollowerModel

logger = logging.getLogger(__name__)


def follow(about: str, model: FollowerModel) -> None:
    """Follow the leader at the other end of the socket that `about` names, until it ends this."""
    place = msgspec.json.decode(about, type=Place)
    link = Link(socket.socket(fileno=place.file))
    try:
        _Follower(link, ThisRank(place.index), model).run()
    finally:
        link.close()


class _Follower:
    """The reader thread answers pings, and says how many batches are computed, while this one computes."""

    def __init__(self, link: Link, this: ThisRank, model: FollowerModel) -> None:
        self._link = link
        self._this = this
        self._model = model
        self._inbox: queue.SimpleQueue[ToFollower | None] = queue.SimpleQueue()
        self._decoder: Decoder | None = None
        self._lanes: FollowingLanes | None = None
        self._counting = threading.Lock()
        self._came = 0
        self._done: set[int] = set()
        self._computed = 0
        self._wanted = 0

    def run(self) -> None:
        reader = threading.Thread(target=self._read, name="follower-reader", daemon=True)
        reader.start()
        try:
            self._link.send(encode(Done("come")))
            facts = self._model.prepare({THIS_RANK: self._this})
            self._link.send(encode(Like(dict(facts))))
            while (message := self._inbox.get()) is not None and not isinstance(message, Close):
                self._take(message)
        except OSError:
            pass  # the leader is gone
        except Exception as error:
            logger.exception("rank %d cannot go on", self._this.index)
            self._say(Failed(in_words(error), isinstance(error, Temporary)))
        finally:
            if self._this.axes is not None:
                self._this.axes.close()
            if self._lanes is not None:
                self._lanes.close()
            self._link.close()
            reader.join()

    def _say(self, message: Failed) -> None:
        with contextlib.suppress(OSError):  # the leader is gone
            self._link.send(encode(message))

    def _read(self) -> None:
        try:
            while (frames := self._link.receive()) is not None:
                for frame in frames:
                    message = to_follower.decode(frame)
                    if isinstance(message, Ping):
                        self._link.send(encode(Pong()))
                    elif isinstance(message, Sync):
                        self._sync(message.number)
                    else:
                        self._inbox.put(message)
        except (OSError, LinkError, msgspec.DecodeError) as error:
            logger.debug("the leader's connection has ended: %s", error)
        self._inbox.put(None)

    def _sync(self, number: int) -> None:
        """Answer now or in `_count`: the main thread may wait in a batch after it, for a rank that waits for this."""
        with self._counting:
            self._wanted = number
            if self._computed >= number:
                self._link.send(encode(Synced(number)))

    def _count(self, number: int) -> None:
        """Count the batch with this number, once those before it are computed, too."""
        with self._counting:
            self._done.add(number)
            while self._computed + 1 in self._done:
                self._computed += 1
                self._done.discard(self._computed)
                if self._computed == self._wanted:
                    self._link.send(encode(Synced(self._wanted)))

    def _take(self, message: ToFollower) -> None:
        if isinstance(message, Load):
            self._model.load()
            self._link.send(encode(Done("load")))
        elif isinstance(message, Measure):
            self._link.send(encode(Room(self._model.room(message.sharing))))
        elif isinstance(message, Start):
            self._model.start(message.num_pages)
            self._decoder = Decoder(message.rows, message.width, self._model.payloads)
            self._link.send(encode(Done("start")))
        elif isinstance(message, Meet):
            assert self._this.axes is not None, "the model was prepared, by which they were set"
            self._this.axes.connect(Path(message.directory), message.timeout)
            if self._this.axes.lanes > 1 and self._this.axes.ranks.sections.first:
                self._lanes = FollowingLanes()
                self._this.axes.ranks.sections.waiting = self._lanes.waiting
            self._link.send(encode(Done("meet")))
        elif isinstance(message, MeetMachines):
            assert self._this.axes is not None, "the model was prepared, by which they were set"
            own: str = self._link.socket.getsockname()[0]
            meeting = Rendezvous(message.host, message.port, own)
            self._this.axes.connect_machines(meeting, message.timeout)
            self._link.send(encode(Done("meet")))
        elif self._decoder is None:
            raise LinkError("a batch comes before there is memory")
        elif isinstance(message, Step):
            self._step(self._decoder.batch(message.fields))
        elif isinstance(message, GoOn):
            assert self._lanes is not None, "it is sent to ranks with lanes alone"
            self._lanes.go_on()
        elif isinstance(message, Table):
            self._model.send_table(self._decoder.table(message))

    def _step(self, work: ModelWorkerBatch) -> None:
        self._came += 1
        number = self._came

        def run() -> None:
            self._model.run(work)
            self._count(number)

        if self._lanes is None:
            run()
        else:
            self._lanes.run(run)
