"""The leader: starts followers, sends them each batch before it computes its own share, and notices their end."""

from __future__ import annotations

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.executor import Executor
from pegboard.core.interfaces.followers import Followers
from pegboard.plugins.parallel import RANK_LAUNCHER
from pegboard.plugins.parallel.api import LaunchContext, Rendezvous
from pegboard.plugins.parallel.delta import Encoder
from pegboard.plugins.parallel.group import Group, GroupLost, Member
from pegboard.plugins.parallel.lanes import Lanes, LanesExecutor
from pegboard.plugins.parallel.messages import GoOn, Link, Measure, Meet, MeetMachines, Place, Start, Step, encode
from pegboard.plugins.parallel.part import NAME, Stamp
from pegboard.toolkit.model.ranks import PENDING
from pegboard.toolkit.system.keyed_sockets import listen

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Pending
    from pegboard.core.interfaces.followers import FollowersContext
    from pegboard.plugins.parallel.axes import Axes
    from pegboard.plugins.parallel.options import ParallelSection
    from pegboard.plugins.parallel.part import RanksPart

logger = logging.getLogger(__name__)

ENTRY = "pegboard.plugins.parallel.follower:follow"


class Leader(Followers):
    """Rank 0 of the `axes`. What is started is ended by `close`, which the executor calls, too."""

    def __init__(self, ctx: FollowersContext, axes: Axes, part: RanksPart, section: ParallelSection) -> None:
        self.sharing = axes.size
        self.lanes = axes.lanes
        self._ctx = ctx
        self._axes = axes
        self._part = part
        self._cores = section.cores
        self._timeout = section.timeout
        self._closing = ExitStack()
        self._closing.callback(axes.close)

    def start(self) -> None:
        ctx = self._ctx
        facts = ctx.facts()  # before a launcher is chosen, which followers have none of
        context = LaunchContext(self.sharing, self._cores, ctx.module, self._axes.reaches_machines)
        self._launcher = ctx.choose.choose(RANK_LAUNCHER, context)
        self._closing.callback(self._launcher.close)
        self._group = Group(self._timeout, facts)
        self._closing.callback(self._group.close)
        for index in range(1, self.sharing):
            self._start(index)
        self._group.watch()

    def _start(self, index: int) -> None:
        def line(file: int) -> bytes:
            return self._ctx.order(ENTRY, msgspec.json.encode(Place(index, self.sharing, file)).decode())

        handle = self._launcher.start(line)
        member = Member(index, Link(handle.connection), handle)
        self._group.members.append(member)
        logger.info("%s of %d was started", member.name, self.sharing)

    def room(self) -> int:
        self._group.wait_for("load")
        self._group.send(encode(Measure(self.sharing)))
        return self._group.room()

    def lead(self, local: Executor, num_pages: int, table: tuple[int, int]) -> Executor:
        group = self._group
        group.send(encode(Start(num_pages, *table)))
        group.wait_for("start")
        # Longer than a rank may be silent: what the group finds out is told, and not that a collective ended.
        self._meet(2 * self._timeout)
        self._part.around = group.within
        group.serving = True
        executor = RanksExecutor(local, group, Encoder(*table), self.close)
        if self.lanes == 1:
            return executor
        ranks, going_on = self._axes.ranks, encode(GoOn())
        lanes = Lanes(lambda: group.send(going_on, ranks.size - 1))
        ranks.sections.waiting = lanes.waiting
        return LanesExecutor(executor, lanes)

    def _meet(self, timeout: float) -> None:
        """Connect the ranks' communicators. Raises GroupLost, with the reason, at once where one of them ends, and not
        that they did not meet.
        """
        if self._launcher.address is None:
            # Where a rank is lost, the thread that meets may still write there.
            with tempfile.TemporaryDirectory(prefix="pegboard-ranks-", ignore_cleanup_errors=True) as meeting:
                self._group.send(encode(Meet(meeting, timeout)))
                self._group.while_there(lambda: self._axes.connect(Path(meeting), timeout))
                self._group.wait_for("meet")
            return
        host, _ = self._launcher.address
        with listen(host) as listener:
            port: int = listener.getsockname()[1]
            self._group.send(encode(MeetMachines(host, port, timeout)))
            meeting_point = Rendezvous(host, port, host, listener)
            self._group.while_there(lambda: self._axes.connect_machines(meeting_point, timeout))
            self._group.wait_for("meet")

    def close(self) -> None:
        self._closing.close()


class _NotSent:
    """The result of a batch that no rank computes."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> object:
        raise self._error


class _Watched:
    """The result of the batch with this number. An error that came before this rank's share of it ends the group: the
    others wait in theirs for good.
    """

    def __init__(self, pending: Pending[object], group: Group, number: int) -> None:
        self._pending = pending
        self._group = group
        self._number = number

    def result(self) -> object:
        try:
            return self._pending.result()
        except Exception as error:
            self._group.failed(self._number, error)
            raise


class RanksExecutor(Executor):
    """Runs batches by `local`, once all followers have been sent them."""

    def __init__(self, local: Executor, group: Group, encoder: Encoder, closed: Callable[[], None]) -> None:
        self._local = local
        self._group = group
        self._encoder = encoder
        self._closed = closed
        self._sent = 0

    def submit(self, work: ModelWorkerBatch | StageWork) -> Pending[object]:
        try:
            if isinstance(work, StageWork):
                self._send_table(work.table)
            else:
                self._send(work)
        except Exception as error:
            return _NotSent(error)
        pending = self._local.submit(work)
        return pending if isinstance(work, StageWork) else _Watched(pending, self._group, self._sent)

    def rerun(self, work: ModelWorkerBatch) -> BatchResult:
        self._send(work)
        try:
            return self._local.rerun(work)
        except Exception as error:
            self._group.failed(self._sent, error)
            raise

    def ask(self, stage: str, payload: object, table: TableChanges | None = None) -> object:
        self._send_table(table)
        return self._local.ask(stage, payload, table)

    def healthy(self) -> bool:
        return self._group.healthy() and self._local.healthy()

    def close(self) -> None:
        self._local.close()
        self._closed()

    def _send(self, work: ModelWorkerBatch) -> None:
        stamp = Stamp(self._sent + 1, work.sampling is not None and work.sampling.steps.shape[0] > 0)
        work.payloads[NAME] = stamp
        if work.future_indices is not None:
            work.extras[PENDING] = True
        try:
            self._group.send(encode(Step(self._encoder.batch(work, stamp))))
        except GroupLost:
            raise
        except Exception as error:  # what is encoded next is as a difference from this
            self._group.give_up(error)
            raise
        self._sent += 1

    def _send_table(self, table: TableChanges | None) -> None:
        if table is not None:
            self._group.send(encode(self._encoder.table(table)))
