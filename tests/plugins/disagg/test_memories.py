"""Places for rooms that are wanted early, and what is known of rooms that have ended."""

from __future__ import annotations

from pegboard.plugins.disagg.answers import LEASE_ENDED, TAKEN
from pegboard.plugins.disagg.memories import MAX_PAST, REMEMBERED, WANT_WAITS, Past, Questions
from pegboard.plugins.disagg.messages import RoomKey
from pegboard.plugins.disagg.prefill_room import Question


def fill(questions: Questions, who: bytes) -> int:
    """Ask for rooms until there is no place; return how many there were."""
    before = len(questions)
    while questions.put(RoomKey(len(questions), who[0]), Question(who, 0, 5, 1, since=0.0)):
        pass
    return len(questions) - before


def test_every_decode_server_leaves_places_to_others() -> None:
    questions = Questions(64)
    assert [fill(questions, who) for who in (b"a", b"b", b"c", b"a")] == [32, 16, 8, 0]
    assert len(questions) == 56
    assert questions.put(RoomKey(50, b"c"[0]), Question(b"c", 9, 5, 1, since=0.0)), "in place of its own"
    assert len(questions) == 56
    assert fill(questions, b"d") > 0


def test_one_place_is_enough() -> None:
    assert fill(Questions(1), b"a") == 1


def test_places_are_free_again() -> None:
    questions = Questions(64)
    fill(questions, b"a")
    for number, question in enumerate(questions):
        question.lost = 40.0 if number % 2 else None
    assert not questions.expire(44.9, 5.0)
    assert not questions.expire(45.0, 5.0)
    assert len(questions) == 16
    late = questions.expire(WANT_WAITS, 5.0)
    assert (len(late), len(questions)) == (16, 0)
    assert fill(questions, b"b") == 32


def test_the_past_is_bounded() -> None:
    past = Past(hold=1.0)
    for room in range(2 * MAX_PAST):
        past.failed(RoomKey(room), (b"a", room), TAKEN, 0.0)
    assert past.get(RoomKey(MAX_PAST - 1)) is None
    assert past.get(RoomKey(MAX_PAST)) is not None
    past.failed(RoomKey(MAX_PAST), None, LEASE_ENDED, 1.0)
    past.expire(REMEMBERED)
    assert past.get(RoomKey(MAX_PAST + 1)) is None
    kept = past.get(RoomKey(MAX_PAST))
    assert kept is not None
    assert kept.answer == LEASE_ENDED
    past.expire(REMEMBERED + 1.0)
    assert past.get(RoomKey(MAX_PAST)) is None
