"""Links over a library that ends what it is told to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from pegboard.plugins.kv_handoff.api.links import Job, Limits, Link, Part, Unanswered, Wire
from pegboard.plugins.kv_handoff.api.transfer import Ranges, TransferError, TransferNews, TransferState
from pegboard.plugins.kv_handoff.suite.rig import ranges

DONE, FAILED, GONE = TransferState.DONE, TransferState.FAILED, TransferState.GONE
LIMITS = Limits(part_bytes=10, part_pieces=4, parts=3, seconds=5.0)


class FakeWire(Wire[int]):
    """Parts are numbered. Each ends when a test says how: "" is well."""

    def __init__(self) -> None:
        self.refuses = ""
        self.is_ready = True
        self.opened = 0
        self.begun: list[tuple[Ranges, Ranges]] = []
        self.ends: dict[int, str] = {}
        self.closed: list[list[int]] = []
        self.threads: set[int] = set()
        self.faults: dict[str, Exception] = {}
        """Errors that are not the contract's, by the call that raises them."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What another thread does once a part has ended."""

    def open(self) -> None:
        self.threads.add(threading.get_ident())
        self.opened += 1
        self._fault("open")
        if self.refuses:
            raise TransferError(self.refuses)

    def _fault(self, call: str) -> None:
        if call in self.faults:
            raise self.faults[call]

    def parts(self, whole: Part, limits: Limits) -> Iterator[Part]:
        self._fault("parts")
        yield from super().parts(whole, limits)

    def ready(self) -> bool:
        self._fault("ready")
        return self.is_ready

    def begin(self, part: Part) -> int:
        self.threads.add(threading.get_ident())
        self._fault("begin")
        self.begun.append((part.source, part.target))
        return len(self.begun) - 1

    def ended(self, token: int) -> bool:
        self.threads.add(threading.get_ident())
        if token not in self.ends:
            return False
        if why := self.ends.pop(token):
            self._fault(why)
            raise Unanswered(why) if why == "no answer" else TransferError(why)
        self.meanwhile()
        return True

    def close(self, under_way: Sequence[int]) -> None:
        self.threads.add(threading.get_ident())
        self.closed.append(list(under_way))


class World:
    """A link, what it has told, and a clock that a test moves."""

    def __init__(self) -> None:
        self.wire = FakeWire()
        self.now = 0.0
        self.told: list[TransferNews] = []
        self.link = Link("test", self.wire, LIMITS, lambda: self.now, self.told.append)

    def read(self, handle: int, nbytes: int) -> Job:
        some = ranges([(0, 0, nbytes)])
        job = Job(handle, Part(some, some, lease=0))
        self.link.submit(job)
        return job

    def until(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + 20
        while not what():
            assert time.monotonic() < end
            time.sleep(0.001)

    def begun(self, count: int) -> None:
        """Wait until so many parts have begun, and see that no more do."""
        self.until(lambda: len(self.wire.begun) >= count)
        self.settled()
        assert len(self.wire.begun) == count

    def settled(self) -> None:
        """Give it time for what must not happen."""
        self.link.nudge()
        time.sleep(0.03)

    def state(self, handle: int) -> TransferState:
        """Wait for the end of a read, which is told once."""
        self.until(lambda: any(news.handle == handle for news in self.told))
        (news,) = [news for news in self.told if news.handle == handle]
        return news.state


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.link.end()
    world.link.thread.join()
    assert world.wire.threads == {world.link.thread.ident}, "only its own thread uses the library"


def test_reads_go_on_in_parts(world: World) -> None:
    world.read(1, 45)
    world.read(2, 10)
    world.begun(3)
    world.wire.ends[1] = ""
    world.begun(4)
    assert [source.total for source, _ in world.wire.begun] == [10] * 4
    world.wire.ends |= {0: "", 2: "", 3: ""}
    world.begun(6)
    assert not world.told
    assert [source.total for source, _ in world.wire.begun[4:]] == [5, 10]
    world.wire.ends[5] = ""
    assert world.state(2) is DONE
    world.wire.ends[4] = ""
    assert world.state(1) is DONE


def test_a_part_that_fails(world: World) -> None:
    """No other one begins, and the read fails once the rest of it has ended."""
    world.read(1, 45)
    world.begun(3)
    world.wire.ends[1] = "lost"
    world.settled()
    assert not world.told
    world.wire.ends |= {0: "", 2: "later"}
    assert world.state(1) is FAILED
    assert world.told[0].reason == "lost"
    assert len(world.wire.begun) == 3


def test_an_abandoned_read(world: World) -> None:
    waiting = world.read(1, 45), world.read(2, 10)
    world.begun(3)
    for job in waiting:
        job.stopped = True
    world.settled()
    assert world.state(2) is GONE
    assert len(world.told) == 1
    world.wire.ends |= {0: "", 1: "", 2: "lost"}
    assert world.state(1) is GONE
    assert len(world.wire.begun) == 3


def test_a_read_that_is_abandoned_when_all_is_there(world: World) -> None:
    job = world.read(1, 10)
    world.begun(1)
    job.stopped = True
    world.wire.ends[0] = ""
    assert world.state(1) is DONE


def test_a_peer_that_does_not_answer(world: World) -> None:
    """What is under way neither fails nor ends, however long that takes; all else fails."""
    abandoned = world.read(1, 10)
    world.read(2, 25)
    world.begun(3)
    world.read(3, 10)
    world.now = 4.9
    world.settled()
    assert not world.told
    world.now = 5.1
    assert world.state(3) is FAILED
    abandoned.stopped = True
    world.read(4, 10)
    assert world.state(4) is FAILED
    world.now = 1e6
    world.settled()
    assert [news.handle for news in world.told] == [3, 4]
    world.wire.ends |= {0: "", 1: ""}
    assert world.state(1) in (DONE, GONE, FAILED)
    world.begun(3)
    world.read(5, 10)
    world.begun(4)
    world.wire.ends |= {2: "", 3: ""}
    assert (world.state(2), world.state(5)) == (FAILED, DONE)
    assert "5 s" in next(news.reason for news in world.told if news.handle == 2)


def test_a_part_without_an_answer_tells_nothing_of_the_others(world: World) -> None:
    """As long as another one is under way the peer does not answer, and nothing more begins."""
    world.read(1, 25)
    world.begun(3)
    world.now = 5.1
    world.settled()
    world.wire.ends[0] = "no answer"
    world.settled()
    world.read(2, 10)
    assert world.state(2) is FAILED
    world.begun(3)
    world.wire.ends |= {1: "no answer", 2: "no answer"}
    assert world.state(1) is FAILED
    world.read(3, 10)
    world.begun(4)
    world.wire.ends[3] = ""
    assert world.state(3) is DONE


def test_a_wire_that_is_not_ready(world: World) -> None:
    world.wire.is_ready = False
    world.read(1, 10)
    world.begun(0)
    world.wire.is_ready = True
    world.begun(1)
    world.wire.ends[0] = ""
    assert world.state(1) is DONE


def test_a_peer_that_cannot_be_reached(world: World) -> None:
    """All that wait fail at once; a later read tries again."""
    world.until(lambda: world.wire.opened)
    world.read(1, 10)
    world.begun(1)
    world.wire.refuses = "not there"
    world.wire.ends[0] = "lost"
    assert world.state(1) is FAILED
    for handle in (2, 3):
        world.read(handle, 10)
        assert world.state(handle) is FAILED
        assert world.told[-1].reason == "not there"
    assert world.wire.opened == 3
    world.wire.refuses = ""
    world.read(4, 10)
    world.begun(2)
    world.wire.ends[1] = ""
    assert world.state(4) is DONE


def test_a_peer_that_is_forgotten(world: World) -> None:
    """It is forgotten once nothing is under way."""
    job = world.read(1, 10)
    world.begun(1)
    job.stopped = True
    world.link.forget()
    world.settled()
    assert not world.wire.closed
    world.wire.ends[0] = "lost"
    world.link.thread.join(20)
    assert world.wire.closed == [[]]
    assert world.state(1) is GONE


def test_a_peer_that_is_forgotten_as_the_last_part_ends(world: World) -> None:
    """A read that still has parts to begin is told of before the thread ends."""
    job = world.read(1, 45)
    world.begun(3)

    def disconnect() -> None:
        job.stopped = True
        world.link.forget()

    world.wire.meanwhile = disconnect
    world.wire.ends |= {0: "", 1: "", 2: ""}
    world.link.thread.join(20)
    assert world.wire.closed == [[]]
    assert world.state(1) is GONE


def test_a_library_that_goes_wrong_while_it_opens(world: World) -> None:
    """Reads fail, and a later one tries again."""
    world.until(lambda: world.wire.opened)
    world.read(1, 10)
    world.begun(1)
    world.wire.faults["open"] = ValueError("broken")
    world.wire.ends[0] = "lost"
    assert world.state(1) is FAILED
    world.read(2, 10)
    assert world.state(2) is FAILED
    assert "broken" in world.told[-1].reason
    world.wire.faults.clear()
    world.read(3, 10)
    world.begun(2)
    world.wire.ends[1] = ""
    assert world.state(3) is DONE


@pytest.mark.parametrize("call", ["parts", "ready"])
def test_a_library_that_goes_wrong_before_anything_begins(world: World, call: str) -> None:
    """All that wait fail, and so does what is asked for later."""
    world.wire.faults[call] = ValueError("broken")
    for handle in (1, 2):
        world.read(handle, 10)
        assert world.state(handle) is FAILED
        assert "broken" in world.told[-1].reason
    world.link.forget()
    world.link.thread.join(20)
    assert world.wire.closed == [[]]


def test_a_library_that_goes_wrong_as_it_begins(world: World) -> None:
    """Nothing says whether the read's memory is written to, so it never ends; others do."""
    world.read(1, 10)
    world.begun(1)
    world.wire.faults["begin"] = ValueError("broken")
    world.read(2, 10)
    world.settled()
    world.read(3, 10)
    assert world.state(3) is FAILED
    world.wire.ends[0] = ""
    assert world.state(1) is FAILED
    world.link.forget()
    world.settled()
    assert world.link.thread.is_alive()
    assert [news.handle for news in world.told] == [3, 1]


def test_a_library_that_goes_wrong_as_it_is_asked(world: World) -> None:
    """The part's memory may be written to until the engine closes; other reads end."""
    world.wire.faults["fault"] = ValueError("broken")
    world.read(1, 10)
    world.read(2, 25)
    world.begun(3)
    world.read(3, 10)
    world.wire.ends[0] = "fault"
    assert world.state(3) is FAILED
    world.read(4, 10)
    assert world.state(4) is FAILED
    world.wire.ends |= {1: "", 2: ""}
    assert world.state(2) is FAILED
    world.link.forget()
    world.settled()
    assert not world.wire.closed
    world.link.end()
    world.link.thread.join(20)
    assert world.wire.closed == [[0]]
    assert [news.handle for news in world.told] == [3, 4, 2]


def test_an_engine_that_closes(world: World) -> None:
    world.read(1, 25)
    world.begun(3)
    world.link.end()
    world.link.thread.join(20)
    assert world.wire.closed == [[0, 1, 2]]
    assert not world.told
