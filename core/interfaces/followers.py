"""Followers: processes that compute each batch along with the scheduler's. What starts them, and what runs in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
    from pegboard.core.interfaces.choosing import Chooser
    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.stage import DevicePart, Stage


class Followers(ABC):
    """Other processes that compute each batch along with the scheduler's, which alone decides and samples. A plugin
    brings them by the hook `followers`, and the core starts them. They read their weights while the scheduler's process
    reads its own.
    """

    sharing: int = 1
    """Processes that share the memory of the scheduler's device, this one included."""

    lanes: int = 1
    """`Executor.lanes` of what `lead` returns. If there are several, its `local` runs batches in the thread that calls
    it, which may be any: one at a time, but that others run while one waits within the model's forward pass."""

    @abstractmethod
    def start(self) -> None:
        """Start them. `pegboard config check` does not call it. Raises PegboardError where one of them cannot be
        started.
        """

    @abstractmethod
    def room(self) -> int:
        """Wait until each has its weights, and return for how many pages of KV each has memory: the least of them.
        Raises PegboardError where one of them cannot read its weights, or has no such room.
        """

    @abstractmethod
    def lead(self, local: Executor, num_pages: int, table: tuple[int, int]) -> Executor:
        """Wait until each has KV memory of so many pages; return what runs batches here, by `local`, and there. `table`
        has the rows and the width of the row table. Its `close` closes them, too. Raises PegboardError where one of
        them cannot.
        """

    @abstractmethod
    def close(self) -> None:
        """End them all, at once. May be called again, and without `start`."""


@dataclass(frozen=True, slots=True)
class FollowersContext:
    """What followers are started by. `stages` and `parts` are those of the scheduler's process. `lacking` says who of
    those that compute the model lacks a capability; None: all have it. `offers` has, by contract, the names and
    capabilities of the providers that the config may still choose, the likeliest first. `facts` returns what
    has to be the same in each of them, such as versions, by what it is called in errors. A step that takes longer than
    `watchdog_timeout` seconds ends the scheduler's process, without a reason.

    `order(entry, about)` is a line of JSON for the standard input of ``python -m`` `module`, which follows for as long
    as that stays open: it calls ``entry(about, model)``, of a lazy name, a text and a FollowerModel.
    """

    choose: Chooser
    stages: Sequence[Stage]
    parts: Sequence[DevicePart]
    lacking: Callable[[str], str | None]
    offers: Mapping[str, Sequence[tuple[str, frozenset[str]]]]
    order: Callable[[str, str], bytes]
    module: str
    facts: Callable[[], Mapping[str, str]]
    watchdog_timeout: float


class FollowerModel(Protocol):
    """A model in a follower's process: the same config as the scheduler's, and no scheduler."""

    def prepare(self, services: Mapping[str, object]) -> Mapping[str, str]:
        """Choose providers as the scheduler does; return `FollowersContext.facts` as they are here. `services` are in
        `ModelContext.services`.
        """

    def load(self) -> None:
        """Read weights."""

    def room(self, sharing: int) -> int:
        """Return for how many pages of KV there is memory, which so many processes share. Raises OutOfMemory."""

    def start(self, num_pages: int) -> None:
        """Get KV memory of so many pages; batches can be run then. Raises OutOfMemory."""

    @property
    def payloads(self) -> Mapping[str, type]:
        """The types of the payloads that its device parts take, by their names."""

    def run(self, work: ModelWorkerBatch) -> None:
        """Run a batch to its end. Raises what the model raises."""

    def send_table(self, table: TableChanges) -> None:
        """Bring changes of the row table alone."""
