"""Which grammar is compiled next: by turns of their owners, and slow ones behind new ones."""

from __future__ import annotations

from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.queue import LATE_SECONDS, GrammarJob, GrammarQueue


def job(name: str, owner: str = "") -> GrammarJob:
    return GrammarJob(Grammar("regex", name), owner)


def taken(queue: GrammarQueue) -> str:
    found = queue.take()
    assert found is not None
    queue.done(found)
    return found.grammar.source


def test_owners_take_turns() -> None:
    queue = GrammarQueue(1)
    for name in ("a1", "a2", "a3"):
        queue.put(job(name, "a"))
    queue.put(job("b1", "b"))
    queue.put(job("c1", "c"))
    assert [taken(queue) for _ in range(5)] == ["a1", "b1", "c1", "a2", "a3"]


def test_one_that_is_cancelled_has_no_turn() -> None:
    queue = GrammarQueue(1)
    first, second = job("a"), job("b")
    queue.put(first)
    queue.put(second)
    assert first.future.cancel()
    assert taken(queue) == "b"


def test_a_slow_one_gives_way_only_where_a_new_one_waits_and_no_worker_is_free() -> None:
    queue = GrammarQueue(2)
    for name in ("slow 1", "slow 2"):
        queue.put(job(name))
    first, second = queue.take(), queue.take()
    assert first is not None
    assert second is not None
    assert not queue.gives_way(first), "no job waits"
    queue.put(job("new"))
    assert queue.gives_way(first)
    assert not queue.gives_way(second), "one is enough"
    queue.put_back(first)
    assert not queue.gives_way(second), "a worker is free for the new one"
    assert taken(queue) == "new"
    late = queue.take()
    assert late is first
    queue.put(job("newer"))
    assert not queue.gives_way(late), "it has the time now that it may take"


def test_late_ones_never_have_all_workers() -> None:
    queue = GrammarQueue(2)
    for name in ("slow 1", "slow 2"):
        queue.put(job(name))
    slow = [queue.take(), queue.take()]
    for name in ("new 1", "new 2"):
        queue.put(job(name))
    for one in slow:
        assert one is not None
        assert queue.gives_way(one)
        queue.put_back(one)
    assert [taken(queue), taken(queue)] == ["new 1", "new 2"]
    late = queue.take()
    assert late is not None
    assert late is slow[0]
    queue.put(job("new 3"))
    assert taken(queue) == "new 3", "the second late one waits although a worker is free"
    queue.done(late)
    assert queue.take() is slow[1]


def queued(queue: GrammarQueue, name: str, now: float) -> GrammarJob:
    one = job(name)
    one.since = now
    queue.put(one)
    return one


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_late_one_has_its_turn_while_new_ones_keep_coming() -> None:
    """One worker, new jobs of a second each that never cease. The late one takes ten seconds."""
    clock = Clock()
    queue = GrammarQueue(1, 60.0, clock)
    slow = [queued(queue, f"slow {number}", 0.0) for number in range(3)]
    for one in slow:
        assert queue.take() is one
        queued(queue, "new", 0.0)
        assert queue.gives_way(one)
        queue.put_back(one)
    ended: dict[str, float] = {}
    news = 0
    while clock.now < 60:
        queued(queue, "new", clock.now)
        found = queue.take()
        assert found is not None
        clock.now += 10 if found.late else 1
        queue.done(found)
        ended[found.grammar.source] = clock.now
        news += not found.late
    assert sorted(ended) == ["new", "slow 0", "slow 1", "slow 2"]
    assert ended["slow 0"] <= LATE_SECONDS + 11
    assert news >= 25, "and new ones have half the time"


def test_each_has_an_answer_in_time() -> None:
    """24 of ten seconds, beside quick ones that never cease. What has waited for too long comes in time to be told."""
    clock = Clock()
    queue = GrammarQueue(2, 60.0, clock)
    slow = {queued(queue, f"slow {number}", 0.0) for number in range(24)}
    answered: dict[GrammarJob, float] = {}
    in_vain = 0
    busy: list[tuple[float, GrammarJob]] = []
    while len(answered) < 24 and clock.now < 200:
        for until, one in [*busy]:
            if until <= clock.now:
                busy.remove((until, one))
                queue.done(one)
                if one in slow:
                    answered[one] = clock.now
            elif one in slow and clock.now - one.taken >= 1 and queue.gives_way(one):
                busy.remove((until, one))
                queue.put_back(one)
        for _ in range(2):
            queued(queue, "quick", clock.now)
        while len(busy) < 2:
            found = queue.take()
            assert found is not None
            late = clock.now - found.since > 60
            in_vain += late and found in slow
            busy.append((clock.now + (0.0 if late else 10.0 if found in slow else 0.5), found))
        clock.now += 0.5
    assert len(answered) == 24
    assert max(answered.values()) <= 60 + 10 + 1
    assert in_vain < 24


def test_who_has_most_makes_room_for_others() -> None:
    queue = GrammarQueue(1)
    for name in ("a1", "a2", "a3"):
        queue.put(job(name, "a"))
    queue.put(job("b1", "b"))
    assert queue.push_out("a") is None, "not for its own"
    gone = queue.push_out("c")
    assert gone is not None
    assert gone.grammar.source == "a3", "its newest one"
    queue.put(job("c1", "c"))
    assert queue.push_out("b") is None, "one for each: nothing would be won"
    assert [taken(queue) for _ in range(4)] == ["a1", "b1", "c1", "a2"]


def test_closing_hands_back_what_is_left() -> None:
    queue = GrammarQueue(1)
    queue.put(job("a"))
    assert [one.grammar.source for one in queue.close()] == ["a"]
    assert queue.take() is None
