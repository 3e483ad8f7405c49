"""The books of encoded media: who is dropped for whom."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.media.api import EncodedStates, PieceKey
from pegboard.plugins.media.arrival import Arrivals, MediaMismatch
from pegboard.plugins.media.encoder_cache import EncodeQueue, EncoderCache
from pegboard.plugins.media.work import NAME, ReqMedia
from tests.plugins.media.media_harness import Album, FakeEncoder, Prompt, media_harness, model_of, submit

REQ = Req("r", np.zeros(1, np.int64), SamplingParams())


class Shelf:
    """Books of `capacity` tokens, one byte each, and requests whose prompts have pieces of two tokens."""

    def __init__(self, folder: Path, capacity: int, step_tokens: int = 100, least_piece: int = 1) -> None:
        self.books = EncoderCache(capacity, 1, step_tokens, least_piece)
        self._album = Album(folder)
        self._arrivals = Arrivals(FakeEncoder(), self.books, 1, folder)

    def media(self, names: str) -> ReqMedia:
        """The media of a request with pictures of these names."""
        prompt = self._album.prompt(*(self._album.item(name, 1, 2) for name in names))
        return self._arrivals.read(prompt.media, np.array(prompt.ids), "")

    def encode(self, names: str, start: int = 0, stop: int = 1000) -> tuple[str, str]:
        """Wish for tokens of a prompt, plan, and name the pieces that are encoded and dropped."""
        wishes = EncodeQueue(self.books)
        wishes.add(REQ, self.media(names), start, stop)
        work = wishes.plan()
        return self.names(one.key for one in work.pieces), self.names(work.drop)

    def names(self, keys: Iterable[PieceKey]) -> str:
        known = {self.media(name).pieces[0]: name for name in "abcdef"}
        return "".join(known[key] for key in keys)


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 6)
    assert [shelf.encode(name) for name in "abc"] == [("a", ""), ("b", ""), ("c", "")]
    shelf.books.hold(1, shelf.media("a").pieces)
    shelf.books.release(1)
    assert shelf.encode("d") == ("d", "b")
    assert shelf.books.used == 6


def test_what_the_same_tokens_read_is_kept(tmp_path: Path) -> None:
    """Else one piece of a chunk would push out another, for ever."""
    shelf = Shelf(tmp_path, 4)
    shelf.encode("ab")
    assert shelf.encode("ac") == ("c", "b")
    assert shelf.encode("bc", 0, 2) == ("b", "a")


def test_what_comes_first_is_encoded_where_not_all_fits(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4)
    shelf.encode("cd")
    # The two that the prompt begins with leave no room for what is there already, and what follows.
    assert shelf.encode("abcd") == ("ab", "cd")


def test_what_steps_read_is_never_dropped(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4)
    shelf.encode("ab")
    shelf.books.hold(7, shelf.media("a").pieces)
    assert shelf.encode("c") == ("c", "b")
    wishes = EncodeQueue(shelf.books)
    shelf.books.hold(8, shelf.media("c").pieces)
    wishes = EncodeQueue(shelf.books)
    assert not wishes.add(REQ, shelf.media("d"), 0, 2)
    assert wishes.blocked
    shelf.books.release(7)
    assert shelf.encode("d") == ("d", "a")


def test_one_step_encodes_so_many_tokens_or_one_larger_piece(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 100, step_tokens=4)
    assert shelf.encode("abcde")[0] == "ab"
    assert shelf.encode("abcde")[0] == "cd"
    alone = Shelf(tmp_path, 100, step_tokens=1)
    assert alone.encode("ab")[0] == "a"
    costly = Shelf(tmp_path, 100, step_tokens=12, least_piece=4)
    assert costly.encode("abcde")[0] == "abc"


def test_a_page_that_reads_too_much_at_once(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4)
    media = shelf.media("abcd")
    assert shelf.books.too_large(media, 1) == 0
    assert shelf.books.too_large(media, 4) == 0
    assert shelf.books.too_large(media, 8) == 8
    twice = shelf.media("aaaabbbb")
    assert shelf.books.too_large(twice, 16) == 0


def test_keys_of_media_are_negative_and_their_own(tmp_path: Path) -> None:
    album, found = Album(tmp_path), dict[str, list[int]]()
    stage = Arrivals(FakeEncoder(), EncoderCache(1000, 1, 1000), 1, tmp_path)
    for name, (height, width, pieces) in {
        "a": (2, 8, 1),
        "b": (2, 8, 1),
        "turned": (8, 2, 1),
        "video": (2, 4, 2),
    }.items():
        item = album.item("same" if name != "b" else "b", height, width, pieces)
        prompt = album.prompt([5, 6], item, [7])
        keys = stage.read(prompt.media, np.array(prompt.ids), "").keys.tolist()
        assert (keys[:2], keys[-1]) == ([5, 6], 7)
        assert all(-(2**62) <= key < 0 for key in keys[2:-1])
        assert stage.read(prompt.media, np.array(prompt.ids), "other").keys.tolist() == keys
        found[name] = keys[2:-1]
    every = [key for keys in found.values() for key in keys]
    assert len(set(every)) == len(every)


def test_states_that_do_not_fit_their_item_are_no_request(tmp_path: Path) -> None:
    """The API process has checked them, and may still be wrong, or taken over."""
    stage = Arrivals(FakeEncoder(), EncoderCache(1000, 1, 1000), 1, tmp_path, width=5)
    album = Album(tmp_path)

    def read(shape: tuple[int, int], size: int, pieces: int = 2) -> ReqMedia:
        item = album.item("a", 2, 3, pieces)
        (tmp_path / item.file).write_bytes(bytes(size))
        item = msgspec.structs.replace(item, encoded=EncodedStates("bfloat16", shape))
        prompt = album.prompt([5], item, [7])
        return stage.read(prompt.media, np.array(prompt.ids), "")

    assert read((12, 5), 120).items[0].encoded == EncodedStates("bfloat16", (12, 5))
    for shape, size, words in (
        ((12, 5), 119, "a file of 119 bytes"),
        ((12, 5), 240, "a file of 240 bytes"),
        ((12, 6), 144, "6 numbers a token"),
        ((13, 5), 130, "13 states for 2 pieces of 6 tokens"),
        ((6, 5), 60, "6 states for 2 pieces"),
        ((-12, -5), 120, "numbers a token"),
    ):
        with pytest.raises(MediaMismatch, match=words):
            read(shape, size)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_batch_that_fails_once_still_has_its_media(loop: str, tmp_path: Path) -> None:
    """Its requests run again one by one, whatever is encoded behind it on a cache of two pieces."""
    album = Album(tmp_path)
    harness = media_harness(tmp_path, capacity=8, encode_tokens=8, loop=loop, cache="none", prefill_first=True)
    model_of(harness).fail_on = lambda work: NAME in work.payloads and len(work.rows) > 1
    asked: dict[str, Prompt] = {}
    for i in range(8):
        asked[str(i)] = album.prompt(album.words(2), album.item(i, 2, 2), album.words(3))
        submit(harness, str(i), asked[str(i)], 5)
    harness.run()
    assert harness.scheduler.counters.failed_batches >= 3
    assert all(harness.tokens(rid) == prompt.answer(5) for rid, prompt in asked.items())
