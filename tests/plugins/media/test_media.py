"""Media in the scheduler: the same tokens as alone in every setting, pieces encoded once, and books that balance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pegboard.core.interfaces.messages import Rejected
from pegboard.core.pipeline.recovery import MAX_SINGLE_FAILURES
from pegboard.plugins.media.api import MediaItem
from tests.core.pipeline.harness import Harness
from tests.plugins.media.media_harness import (
    TOKEN_BYTES,
    Album,
    Prompt,
    books_of,
    media_harness,
    model_of,
    submit,
    text_answer,
)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"page_size": 16},
    {"chunk": 7},
    {"chunk": 32, "page_size": 16},
    {"chunk": 7, "loop": "overlap"},
    {"chunk": 32, "page_size": 16, "loop": "overlap", "mixed_chunk": True},
    {"chunk": 7, "mixed_chunk": True},
    {"chunk": 16, "split_prefill_layers": 2},
    {"chunk": 16, "split_prefill_layers": 2, "loop": "overlap"},
    {"cache": "block", "page_size": 16, "chunk": 16},
    {"cache": "none", "chunk": 7},
]
TIGHT: dict[str, Any] = {"tokens": 224, "max_context_len": 224, "max_running_requests": 8, "new_token_ratio": 0.01}


def _conversations(album: Album, count: int) -> dict[str, Prompt | list[int]]:
    """Prompts that share pictures, texts, both or neither; some are text alone."""
    rng, found = album.random, dict[str, Prompt | list[int]]()
    openings = [album.words(n) for n in (0, 3, 20)]
    for i in range(count):
        if i % 4 == 3:
            found[f"text-{i}"] = rng.choice(openings) + album.words(rng.randint(1, 30))
            continue
        parts: list[list[int] | MediaItem] = [rng.choice(openings)]
        for _ in range(rng.randint(1, 3)):
            pieces = rng.choice([1, 1, 1, 3])
            parts += [album.item(rng.randrange(4), rng.randint(1, 4), rng.randint(1, 4), pieces)]
            parts += [album.words(rng.randint(0, 9))]
        found[f"media-{i}"] = album.prompt(*parts, album.words(1))
    return found


@pytest.mark.parametrize("memory", ["ample", "tight"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: "-".join(f"{k}={v}" for k, v in one.items()) or "plain")
def test_the_same_tokens_as_alone(setting: dict[str, Any], memory: str, tmp_path: Path) -> None:
    tight = memory == "tight"
    retractions = 0
    for seed in range(3 if tight else 1):
        harness = media_harness(tmp_path, capacity=64, **{**setting, **(TIGHT if tight else {})})
        album = Album(tmp_path, seed)
        asked = _conversations(album, 24)
        _play(harness, asked, album.random, at_once=tight)
        for rid, prompt in asked.items():
            expected = prompt.answer(30) if isinstance(prompt, Prompt) else text_answer(prompt, 30)
            assert harness.tokens(rid) == expected, rid
        model, books = model_of(harness), books_of(harness)
        assert all(key in books for key in model.encoded)
        assert len(model.encoded) == len(books)
        retractions += harness.scheduler.counters.retractions
    assert not tight or retractions


def _play(harness: Harness, asked: Mapping[str, Prompt | list[int]], rng: Random, *, at_once: bool) -> None:
    waiting = list(asked.items())
    while waiting:
        for rid, prompt in waiting[: 8 if at_once else rng.choice([0, 1, 6])]:
            if isinstance(prompt, Prompt):
                submit(harness, rid, prompt, 30)
            else:
                harness.submit(rid, prompt, 30)
            waiting.remove((rid, prompt))
        harness.step()
    harness.run()


def test_one_picture_is_encoded_once_for_all(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, cache="none")
    asked = {str(i): album.prompt(album.words(i), album.item("same", 3, 3), album.words(2)) for i in range(16)}
    for rid, prompt in asked.items():
        submit(harness, rid, prompt)
    harness.run()
    assert len(model_of(harness).shown) == 1
    assert (books_of(harness).encoded, books_of(harness).hits) == (1, 15)
    assert all(harness.tokens(rid) == prompt.answer(8) for rid, prompt in asked.items())


def test_a_cached_prefix_is_not_encoded_again(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, capacity=16)
    opening, other = album.words(5), album.prompt(album.item("other", 4, 4), album.words(1))
    first = album.prompt(opening, album.item("a", 3, 3), album.words(4))
    submit(harness, "first", first)
    harness.run()
    submit(harness, "displaces", other)
    harness.run()
    shown = len(model_of(harness).shown)
    again = album.prompt(first.ids[:5], album.item("a", 3, 3), first.ids[14:] + harness.tokens("first") + [3, 4])
    submit(harness, "again", again)
    harness.run()
    assert len(model_of(harness).shown) == shown
    assert harness.tokens("again") == again.answer(8)
    assert harness.outputs["again"][-1].cached_tokens >= len(first.ids)


@pytest.mark.parametrize("other", [("b", 3, 3), ("a", 1, 9), ("a", 9, 1)])
def test_another_picture_shares_nothing_from_there_on(other: tuple[str, int, int], tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path)
    opening, rest = album.words(5), album.words(4)
    for rid, look in (("one", ("a", 3, 3)), ("two", other)):
        prompt = album.prompt(opening, album.item(*look), rest)
        submit(harness, rid, prompt)
        harness.run()
        assert harness.tokens(rid) == prompt.answer(8)
    assert harness.outputs["two"][-1].cached_tokens == len(opening)


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_no_decode_waits_for_two_others(loop: str, mixed: bool, tmp_path: Path) -> None:
    """A long video is encoded piece by piece, and then its prompt is computed chunk by chunk. What runs gets a token
    after each of them, and not after a piece and a chunk.
    """
    album = Album(tmp_path)
    harness = media_harness(tmp_path, capacity=64, encode_tokens=4, chunk=16, loop=loop, mixed_chunk=mixed)
    harness.submit("runs", album.words(3), 100, sampling={"ignore_eos": True}, stream=True)
    for _ in range(3):
        harness.step()
    prompt = album.prompt(album.item("long", 2, 4, 8), album.words(20), album.item("short", 2, 2), album.words(9))
    submit(harness, "watches", prompt)
    steps = model_of(harness).steps
    begun = len(steps)
    harness.run()
    assert harness.tokens("watches") == prompt.answer(8)
    assert steps[begun:].count("encode") == 9
    for one, other in itertools.pairwise(steps[begun:]):
        # What runs gets a token at the end of a mixed step: it has waited for a chunk.
        assert other == "decode" or one in ("decode", "mixed"), steps[begun:]


def test_several_requests_share_an_encode_step(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, encode_tokens=16)
    asked = {str(i): album.prompt(album.item(i, 2, 2), album.words(2)) for i in range(4)}
    for rid, prompt in asked.items():
        submit(harness, rid, prompt)
    harness.run()
    assert harness.scheduler.info()["encode_steps"] == 1
    assert harness.scheduler.counters.prefill_steps == 1


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_what_cannot_be_encoded_fails_its_requests_alone(loop: str, tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, loop=loop, chunk=16)
    bad = album.item("bad", 2, 2)
    model_of(harness).broken = frozenset({bad.digest})
    good = {str(i): album.prompt(album.words(i), album.item(i, 2, 2), album.words(3)) for i in range(6)}
    harness.submit("text", album.words(4), 20)
    for rid, prompt in good.items():
        submit(harness, rid, prompt)
        submit(harness, f"bad-{rid}", album.prompt(album.words(2), bad, album.words(1)))
    harness.run()
    for rid, prompt in good.items():
        assert harness.tokens(rid) == prompt.answer(8)
        end = harness.finish(f"bad-{rid}")
        assert (end["status"], end["code"]) == (500, "media_failed")
    assert harness.finish("text")["type"] != "abort"


@pytest.mark.parametrize("good", [None, 0, 9])
def test_an_encoder_that_fails_for_everything_is_not_asked_for_each(good: int | None, tmp_path: Path) -> None:
    """Four failures are enough where nothing has passed. Files that are gone are not its fault, and are tried."""
    album = Album(tmp_path)
    harness = media_harness(tmp_path, encode_tokens=64)
    asked = {i: album.prompt(album.words(2), album.item(i, 2, 2), album.words(1)) for i in range(16)}
    digests = {i: prompt.media.items[0].digest for i, prompt in asked.items()}
    model_of(harness).broken = frozenset(digest for i, digest in digests.items() if i != good)
    for i, prompt in asked.items():
        submit(harness, str(i), prompt)
    lost = [0, 1, 2, 3, 4] if good == 9 else []
    for i in lost:
        (tmp_path / asked[i].media.items[0].file).unlink()
    harness.run()
    for i, prompt in asked.items():
        if i == good == 0:
            assert harness.tokens(str(i)) == prompt.answer(8)
        else:
            assert harness.finish(str(i))["code"] == "media_failed"
    tries = {None: 4, 0: 16, 9: len(lost) + MAX_SINGLE_FAILURES}[good]
    assert model_of(harness).tries == 1 + tries
    assert books_of(harness).used == (0 if good != 0 else 4 * TOKEN_BYTES)


def test_a_file_that_went_with_its_request_is_read_from_another(tmp_path: Path) -> None:
    """Two requests show one picture; the first one's file goes before the picture is encoded."""
    album = Album(tmp_path)
    harness = media_harness(tmp_path)
    one, two = (album.prompt(album.item("same", 2, 2), album.words(i + 1)) for i in range(2))
    submit(harness, "one", one)
    submit(harness, "two", two)
    (tmp_path / one.media.items[0].file).unlink()
    harness.run()
    assert harness.tokens("two") == two.answer(8)
    assert harness.tokens("one") == one.answer(8)


def test_tenants_share_no_encoded_media(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path)
    for tenant in "ab":
        submit(harness, tenant, album.prompt(album.item("same", 2, 2), album.words(1)), namespace=tenant)
        harness.run()
    assert [key.namespace for key in model_of(harness).shown] == ["a", "b"]


def test_media_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, capacity=8)
    good = album.prompt(album.words(2), album.item("a", 2, 2), album.words(2))

    def refused(rid: str, prompt: Prompt) -> tuple[int, str]:
        reply = submit(harness, rid, prompt)
        assert isinstance(reply, Rejected), rid
        return reply.status, reply.code

    assert refused("large", album.prompt(album.item("b", 3, 3), album.words(1))) == (400, "media_too_large")
    assert "media.cache_bytes" in submit(harness, "l", album.prompt(album.item("b", 3, 3), [1])).message
    (tmp_path / good.media.items[0].file).write_bytes(b"short")
    assert refused("short", good) == (500, "media_failed")
    (tmp_path / good.media.items[0].file).unlink()
    assert refused("gone", good) == (500, "media_failed")
    assert harness.scheduler.idle
    assert books_of(harness).capacity == 8 * TOKEN_BYTES


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_split_prefill_that_fails_holds_nothing(loop: str, tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, loop=loop, chunk=16, split_prefill_layers=2)
    failures = iter([True])
    model_of(harness).fail_on = lambda work: work.part is not None and not work.part.last and next(failures, False)
    harness.submit("runs", album.words(3), 30, sampling={"ignore_eos": True})
    for _ in range(3):
        harness.step()
    asked = {rid: album.prompt(album.words(2), album.item(rid, 2, 2), album.words(3)) for rid in "ab"}
    for rid, prompt in asked.items():
        submit(harness, rid, prompt)
    harness.run()
    assert harness.scheduler.counters.failed_batches > 0
    assert not books_of(harness).held
    assert all(harness.tokens(rid) == prompt.answer(8) for rid, prompt in asked.items())


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_file_that_is_lost_fails_its_request_and_tells_no_path(loop: str, tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, loop=loop)
    lost = album.prompt(album.item("lost", 2, 2), album.words(2))
    submit(harness, "lost", lost)
    (tmp_path / lost.media.items[0].file).unlink()
    harness.run()
    end = harness.finish("lost")
    assert (end["status"], end["code"]) == (500, "media_failed")
    assert str(tmp_path) not in end["message"]
    assert harness.scheduler.counters.failed_batches == 0, "no encoder has failed"


def test_a_piece_that_fails_is_tried_once_for_all_who_want_it(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path)
    bad = album.item("bad", 2, 2)
    model = model_of(harness)
    model.broken = frozenset({bad.digest})
    for i in range(8):
        submit(harness, str(i), album.prompt(bad, album.words(i + 1), bad, [3]))
    harness.run()
    assert all(harness.finish(str(i))["status"] == 500 for i in range(8))
    assert model.tries <= 2 * 2


def test_an_urgent_request_pushes_nobody_out_before_it_can_be_computed(tmp_path: Path) -> None:
    album = Album(tmp_path)
    harness = media_harness(tmp_path, policy="priority", max_running_requests=1, encode_tokens=4, chunk=64)
    harness.submit("runs", album.words(3), 60, sampling={"ignore_eos": True})
    for _ in range(3):
        harness.step()
    prompt = album.prompt(album.item("long", 2, 2, 6), album.words(2))
    submit(harness, "urgent", prompt, priority=5)
    counters = harness.scheduler.counters
    while not counters.preemptions:
        assert "runs" not in harness.outputs, "the urgent one waited to the end"
        harness.step()
    assert len(model_of(harness).shown) == 6
    harness.run()
    assert harness.tokens("urgent") == prompt.answer(8)
