"""When pages are copied, what is evicted from the host, what is written to storages, and how much is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from pegboard.conformance.prefix_cache.books import Books, key_of
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from pegboard.plugins.cache_hiradix.options import HiRadixOptions
from pegboard.plugins.kv_tiers.suite.prefix_tier_books import TierBooks
from pegboard.plugins.kv_tiers.suite.tier_fakes import HandMover


def books_of(
    num_pages: int = 32, host_pages: int = 64, *, stores: Sequence[str] = (), block_pages: int = 4, **options: Any
) -> TierBooks:
    chosen = HiRadixOptions.model_validate({"load_threshold": 1, "prefetch_threshold": 1, **options})
    mover = HandMover(host_pages, block_pages, stores)
    return TierBooks(lambda ctx: HiRadixCache(chosen, ctx), num_pages, 1, mover=mover)


def counted(books: TierBooks, what: str) -> float:
    return books.cache.stats()[f"{what}_tokens_total"]


def on_host(books: TierBooks, *prompts: Sequence[int]) -> list[int]:
    """How much of each prompt is on the host, once the device has nothing; asks without a use."""
    books.evict(1_000_000)
    return [books.match(prompt).promised for prompt in prompts]


def test_few_tokens_on_the_host_are_not_worth_a_load() -> None:
    books = books_of(load_threshold=10)
    books.insert(range(19))
    books.settle()
    for freed, found in ((9, 0), (1, 10), (1, 11)):
        books.evict(freed)
        assert books.match(range(19)).promised == found


def test_a_long_path_is_copied_in_pieces() -> None:
    books = books_of(save_batch=8)
    books.insert(range(20))
    assert [job.size for job in books.mover.jobs] == [8, 8, 4]
    books.mover.finish(books.mover.jobs[0])
    books.poll()
    assert on_host(books, range(20)) == [8]


def test_what_has_no_room_is_skipped_and_copied_when_it_is_used_again() -> None:
    books = books_of(host_pages=8)
    books.insert(range(12))  # all of the host's pages are being written to
    assert counted(books, "skipped") == 4
    books.insert([100, 101])
    assert counted(books, "skipped") == 6
    books.settle()
    books.match([100, 101])
    books.settle()
    assert on_host(books, [100, 101], range(12)) == [2, 6]


def test_host_pages_that_the_device_has_go_first() -> None:
    books = books_of(num_pages=8, host_pages=8)
    books.insert([1, 2])
    books.insert([3, 4])
    books.settle()
    books.evict(4)
    books.insert([5, 6])
    books.insert([7, 8])
    books.settle()
    for prompt in ([1, 2], [3, 4]):  # used last of all, but lost if they go
        books.match(prompt)
    books.match([5, 6])
    books.insert([9])
    books.settle()
    assert counted(books, "host_evicted") == 1
    assert on_host(books, [1, 2], [3, 4], [5, 6], [7, 8], [9]) == [2, 2, 2, 1, 1]


def test_beyond_these_the_least_recently_used_goes_first_but_no_locked_tail() -> None:
    books = books_of(num_pages=8, host_pages=8)
    for prompt in ([1, 2], [3, 4], [5, 6], [7, 8]):
        books.insert(prompt)
    books.settle()
    books.evict(8)
    lock = books.lock([1, 2, 9])
    assert lock.promised == 2
    for prompt in ([3, 4], [5, 6], [7, 8], [1, 2]):
        books.match(prompt)
    books.unlock(books.lock([3, 4]))
    books.insert([10, 11, 12])
    books.settle()
    assert on_host(books, [1, 2], [3, 4], [5, 6], [7, 8], [10, 11, 12]) == [2, 2, 0, 1, 3]


def test_only_what_changes_an_answer_is_news() -> None:
    books = books_of(save_batch=1)
    books.insert(range(3))
    first, second, third = books.mover.jobs
    version = books.cache.version
    for job in (third, second):
        books.mover.finish(job)
    books.poll()
    assert books.cache.version == version, "what the device has anyway was copied"
    books.evict(1)
    found = books.match(range(3))
    assert (len(found), found.promised) == (2, 0)
    version = books.cache.version
    books.mover.finish(first)
    books.poll()
    assert books.cache.version > version, "behind that copy there is one more page on the host"
    found = books.match(range(3))
    assert (len(found), found.promised) == (2, 1)


def test_what_comes_from_storages_or_leaves_the_host_is_news() -> None:
    books = stored(range(40))
    versions = [books.cache.version]
    books.prefetch(range(40))
    books.settle()
    versions.append(books.cache.version)
    assert books.match(range(40)).promised == 40
    for start in range(1000, 1600, 100):
        books.insert(range(start, start + 100))
        books.settle()
        books.evict(1000)
    versions.append(books.cache.version)
    assert books.match(range(40)).promised == 0
    assert versions == sorted(set(versions))


def test_selective_waits_for_the_second_use() -> None:
    books = books_of(write_policy="write_through_selective", hits_to_save=3)
    books.insert(range(8))
    books.match(range(8))
    assert not books.mover.jobs
    books.match(range(4))
    assert [job.size for job in books.mover.jobs] == [4], "the shorter prefix is the third use of that alone"
    books.match([*range(8), 100])
    assert [job.size for job in books.mover.jobs] == [4, 4]


def test_write_back_copies_the_coldest_before_they_are_needed() -> None:
    books = books_of(write_policy="write_back", clean_share=0.25)
    for start in (0, 100, 200):
        books.insert(range(start, start + 6))
    books.match(range(6))
    assert not books.mover.jobs
    busy = [books.cache.busy]
    books.poll()
    books.settle()
    assert counted(books, "cleaned") == 12
    assert [*busy, books.cache.busy] == [True, False], "whether there is something to be copied"
    assert on_host(books, range(6), range(100, 106), range(200, 206)) == [0, 6, 6]


def test_write_back_looks_at_what_goes_first_and_not_at_what_is_copied_and_warm() -> None:
    books = books_of(write_policy="write_back", clean_share=0.25, sync_tokens=0)
    for start in (0, 100, 200):
        books.insert(range(start, start + 8))
    books.settle()
    assert counted(books, "cleaned") == 8
    books.match(range(8))  # what is copied goes last now
    books.settle()
    assert counted(books, "cleaned") == 16
    books.evict(8)
    assert counted(books, "dropped") == 0
    assert books.match(range(100, 108)).promised == 8


def test_what_eviction_finds_uncopied_is_copied_up_to_a_bound() -> None:
    books = books_of(write_policy="write_back", clean_share=0.0, sync_tokens=8)
    books.mover.on_wait = lambda jobs: books.mover.finish_all()
    for start in (0, 100, 200):
        books.insert(range(start, start + 6))
    assert on_host(books, range(6), range(100, 106), range(200, 206)) == [6, 0, 0]
    assert (counted(books, "rescued"), counted(books, "dropped")) == (6, 12)
    books.poll()  # the next step
    books.insert(range(300, 306))
    books.mover.on_wait = lambda jobs: None
    assert on_host(books, range(300, 306)) == [0], "a copy that takes too long is not waited for"
    assert counted(books, "dropped") == 18


def test_whole_blocks_are_written_once_they_are_ready() -> None:
    books = books_of(stores=("near", "far"))
    books.insert(range(10))
    assert [job.kind for job in books.mover.jobs] == ["save"]
    books.settle()
    assert [len(blocks) for blocks in books.mover.blocks] == [2, 2]
    books.insert(range(13))
    books.insert([*range(7), 100])
    books.settle()
    assert [len(blocks) for blocks in books.mover.blocks] == [4, 4]
    contents = {block[-1] for block in books.mover.blocks[0].values()}
    ends = [range(4), range(8), range(12), [*range(7), 100]]
    assert contents == {("", tuple(end)) for end in ends}
    assert counted(books, "stored") == 2 * 4 * 4


def test_storages_get_what_is_used_often_enough() -> None:
    books = books_of(stores=("one",), hits_to_store=2)
    books.insert(range(8))
    books.settle()
    assert not books.mover.blocks[0]
    books.match(range(4))
    books.settle()
    assert len(books.mover.blocks[0]) == 1


def test_what_a_storage_could_not_take_is_offered_again_and_how_much_waits_is_bounded() -> None:
    books = books_of(stores=("one",), store_share=0.125)  # 8 pages
    books.insert(range(24))
    books.mover.finish_all("save")
    books.poll()
    assert [job.size for job in books.mover.jobs] == [2]
    assert counted(books, "store_skipped") == 16
    books.mover.finish(books.mover.jobs[0], 1, "it broke")
    books.poll()
    assert counted(books, "store_failed") == 4
    for stored in (3, 5, 6):
        books.match(range(24))
        books.settle()
        assert len(books.mover.blocks[0]) == stored


def stored(prompt: Sequence[int], **options: Any) -> TierBooks:
    """Return books of a cache that has forgotten a prompt which a storage has."""
    books = books_of(256, stores=("one",), store_share=1.0, **{"host_pages": 512, **options})
    books.insert(prompt)
    books.settle()
    books.reset()
    books.settle()
    return books


def test_groups_of_blocks_are_usable_once_they_have_come() -> None:
    books = stored(range(150))  # 37 blocks
    prefetch = books.prefetch(range(150))
    assert (prefetch.done, prefetch.tokens, prefetch.wanted) == (False, 0, None)
    books.mover.finish_all()
    books.poll()
    assert (prefetch.done, prefetch.tokens, prefetch.wanted) == (False, 0, 148)
    first, second = books.mover.jobs
    books.mover.finish(second)
    books.poll()
    assert prefetch.tokens == 0, "nothing stands on the host behind a gap"
    books.mover.finish(first)
    books.poll()
    assert prefetch.tokens == 128
    assert books.match(range(150)).promised == 128
    books.settle()
    assert (prefetch.done, prefetch.tokens) == (True, 148)


def test_a_prefetch_goes_on_from_what_is_on_the_device() -> None:
    books = stored(range(40))
    books.insert(range(10))  # not copied yet
    prefetch = books.prefetch(range(40))
    assert books.mover.jobs[-1].keys == list(books.mover.blocks[0])[2:]
    books.settle()
    assert (prefetch.tokens, prefetch.wanted) == (40, 40)
    found = books.match(range(40))
    assert (len(found), found.promised, found.promised_from["storage"]) == (10, 30, 30)
    books.evict(1000)
    found = books.match(range(40))
    assert (len(found), found.promised) == (0, 40)


@pytest.mark.parametrize("closed", [0, 1])
def test_one_of_two_that_want_the_same_may_go(closed: int) -> None:
    books = stored(range(100))
    both = [books.prefetch(range(100)), books.prefetch([*range(80), *range(500, 520)])]
    books.mover.finish_all()
    books.poll()
    both[closed].close()
    assert both[closed].done
    books.settle()
    other = both[1 - closed]
    assert (other.done, other.tokens) == (True, 100 if closed else 80)


def test_a_prefetch_has_a_share_of_the_host_and_no_more() -> None:
    books = stored(range(100), host_pages=100, prefetch_share=0.25)
    prefetch = books.prefetch(range(100))
    books.mover.finish_all()
    for _ in range(20):
        books.poll()
        assert sum(job.host.size for job in books.mover.jobs) <= 25
        if books.mover.jobs:
            books.mover.finish(books.mover.jobs[0])
    assert (prefetch.done, prefetch.tokens) == (True, 100)


def test_short_prompts_are_not_worth_a_prefetch() -> None:
    books = stored(range(40), prefetch_threshold=36)
    books.insert(range(8))
    assert books.prefetch(range(40)).done
    assert books.prefetch([*range(32), 1, 2, 3, 4, 5, 6]).done
    books.evict(1000)
    books.reset()
    books.settle()
    prefetch = books.prefetch([*range(32), 1, 2, 3, 4])
    assert not prefetch.done
    books.mover.finish_all()
    books.poll()
    assert (prefetch.done, prefetch.tokens, prefetch.wanted) == (True, 0, 0), "of which a storage has 32"


def test_without_a_mover_a_prefetch_knows_what_the_device_has() -> None:
    books = Books(lambda ctx: HiRadixCache(HiRadixOptions(), ctx), 512)
    books.insert(range(300))
    assert isinstance(books.cache, HiRadixCache)
    prefetch = books.cache.prefetch(key_of(range(400)))
    assert (prefetch.done, prefetch.tokens, prefetch.wanted) == (True, 300, 300)
    prefetch.close()
    books.cache.poll()
    assert not books.cache.busy


def test_options_are_checked() -> None:
    for wrong in ({"write_policy": "write_never"}, {"clean_share": 1.5}, {"load_threshold": 0}, {"hits": 2}):
        with pytest.raises(ValidationError):
            HiRadixOptions.model_validate(wrong)
