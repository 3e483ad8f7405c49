"""The part of an engine that is the same for all libraries that links read by."""

from __future__ import annotations

import abc
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias

import numpy as np

from pegboard.core.interfaces.options import OptionsT
from pegboard.plugins.kv_handoff.api.links import Job, Limits, Link, Part, TokenT, Wire
from pegboard.plugins.kv_handoff.api.pieces import check_read, objection
from pegboard.plugins.kv_handoff.api.transfer import (
    KVTransfer,
    KVTransferContext,
    Ranges,
    TransferError,
    TransferNews,
    TransferState,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.kv_handoff.api.staging import Staging
    from pegboard.plugins.kv_handoff.api.staging_reader import Stage, StagingPlace, Straight

    AnyLink: TypeAlias = Link[TokenT] | Link[Straight[TokenT] | Stage[TokenT]]


class Reach(NamedTuple, Generic[TokenT]):
    """How a peer is read from: the library's wire, the sizes int64 [regions] of its regions, and the staging that it
    has behind these, if it has.
    """

    wire: Wire[TokenT]
    sizes: NDArray[np.int64]
    staging: StagingPlace | None = None


class LinkedTransfer(KVTransfer[OptionsT], Generic[TokenT, OptionsT]):
    """An engine with a link to each peer. Engines add `describe`, `reach` and `shut`, and where they have staging they
    register its region with their library, behind those of the context.
    """

    def __init__(
        self, options: OptionsT, ctx: KVTransferContext, limits: Limits, staging: Staging | None = None
    ) -> None:
        super().__init__(options, ctx)
        self.sizes: NDArray[np.int64] = np.array([region.nbytes for region in ctx.regions], np.int64)
        self.staging = staging
        self._limits = limits
        self._links: dict[str, tuple[AnyLink[TokenT], NDArray[np.int64]]] = {}
        self._forgotten: list[AnyLink[TokenT]] = []
        self._jobs: dict[int, tuple[str, AnyLink[TokenT], Job]] = {}
        self._news: deque[TransferNews] = deque()
        self._counts: Counter[str] = Counter()
        self._handles = 0

    @abc.abstractmethod
    def reach(self, host: str, description: bytes) -> Reach[TokenT]:
        """Return how a peer is read from. Raises TransferError for a description that is not one. It must not wait."""

    @abc.abstractmethod
    def shut(self) -> None:
        """Let go of the library, after all links. When this returns nothing is read from the regions, or written."""

    def allow(self, lease: int) -> None:
        if self.staging is not None:
            self.staging.leases.allow(lease)

    def revoke(self, lease: int) -> None:
        if self.staging is not None:
            self.staging.leases.revoke(lease)

    def connect(self, peer: str, host: str, description: bytes) -> None:
        reach = self.reach(host, description)
        if reach.staging is not None:
            reach.staging.check()
        self.disconnect(peer)
        self._links[peer] = self._link(host, reach), reach.sizes

    def _link(self, host: str, reach: Reach[TokenT]) -> AnyLink[TokenT]:
        name, clock, tell = f"read-{host}", self.ctx.clock, self._news.append
        if reach.staging is None or self.staging is None:
            return Link(name, reach.wire, self._limits, clock, tell)
        staged = self.staging.wire(reach.wire, host, reach.staging, len(reach.sizes))
        return Link(name, staged, self._limits, clock, tell)

    def read(self, peer: str, lease: int, source: Ranges, target: Ranges) -> int:
        if peer not in self._links:
            raise TransferError(f"{peer!r} is not connected")
        check_read(source, target, self.sizes)
        link, sizes = self._links[peer]
        self._handles += 1
        job = Job(self._handles, Part(source, target, lease))
        if wrong := objection(source, sizes):
            job.fail(f"the source of a read: {wrong}")
        if job.over or not len(source):
            self._news.append(job.news())
        else:
            self._jobs[job.handle] = peer, link, job
            link.submit(job)
        return job.handle

    def poll(self) -> Sequence[TransferNews]:
        news = []
        while self._news:
            news.append(self._news.popleft())
            _, _, job = self._jobs.pop(news[-1].handle, (None, None, None))
            self._counts[f"reads_{news[-1].state.value}_total"] += 1
            if job is not None and news[-1].state is TransferState.DONE:
                self._counts["read_bytes_total"] += job.whole.target.total
        self._forgotten = [link for link in self._forgotten if link.thread.is_alive()]
        return news

    def abandon(self, handle: int) -> None:
        if handle in self._jobs:
            _, link, job = self._jobs[handle]
            job.stopped = True
            link.nudge()

    def disconnect(self, peer: str) -> None:
        if peer in self._links:
            link, _ = self._links.pop(peer)
            for _, own, job in self._jobs.values():
                job.stopped |= own is link
            link.forget()
            self._forgotten.append(link)

    def stats(self) -> Mapping[str, float]:
        staged = {} if self.staging is None else self.staging.stats()
        return {**self._counts, **staged, "reads_under_way": len(self._jobs)}

    def close(self) -> None:
        links = [*(link for link, _ in self._links.values()), *self._forgotten]
        for link in links:
            link.end()
        for link in links:
            # A library that waits for a peer for longer is left to its thread.
            link.thread.join(self._limits.seconds)
        if self.staging is not None:
            self.staging.close()
        self.shut()
        self._links.clear()
        self._jobs.clear()
        self._news.clear()
