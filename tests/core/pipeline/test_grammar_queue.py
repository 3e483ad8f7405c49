"""Which grammar is compiled next: by turns of their owners, and slow ones behind new ones."""

from __future__ import annotations

from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.pipeline.grammar_queue import GrammarJob, GrammarQueue


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
    assert late is slow[0]
    queue.put(job("new 3"))
    assert taken(queue) == "new 3", "the second late one waits although a worker is free"
    queue.done(late)
    assert queue.take() is slow[1]


def test_closing_hands_back_what_is_left() -> None:
    queue = GrammarQueue(1)
    queue.put(job("a"))
    assert [one.grammar.source for one in queue.close()] == ["a"]
    assert queue.take() is None
