"""The order of eviction, the hash chain, and what the block cache does beyond its contract."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pegboard.conformance.fakes import CountingAllocator
from pegboard.conformance.prefix_cache.books import Books, key_of
from pegboard.core.interfaces.keys import PrefixMemo
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.cache_block import blocks as blocks_module
from pegboard.plugins.cache_block.blocks import BlockTable
from pegboard.plugins.cache_block.cache import BlockCache
from pegboard.toolkit.cache.block_keys import ChainDigests


def books_of(page_size: int = 1, num_pages: int = 32) -> Books:
    return Books(lambda ctx: BlockCache(NoOptions(), ctx), num_pages, page_size)


def cache_of(books: Books) -> BlockCache:
    assert isinstance(books.cache, BlockCache)
    return books.cache


def order(books: Books) -> list[tuple[int, ...]]:
    gone = []
    while books.known:
        before = set(books.known)
        assert books.evict(1) == books.page_size
        gone += [tokens for _, tokens in before - set(books.known)]
    return gone


def test_the_least_recently_used_goes_first_and_a_chain_from_its_end() -> None:
    books = books_of()
    for tokens in ([1, 2, 3], [4, 5], [6]):
        books.insert(tokens)
    books.match([1, 2])
    assert order(books) == [(1, 2, 3), (4, 5), (4,), (6,), (1, 2), (1,)]


def test_unlocking_is_a_use() -> None:
    books = books_of()
    books.insert([1, 2])
    books.insert([3])
    lock = books.lock([1, 2])
    books.insert([4])
    books.unlock(lock)
    assert order(books) == [(3,), (4,), (1, 2), (1,)]


def test_a_fork_keeps_its_common_part_longest() -> None:
    books = books_of()
    books.insert([1, 2, 3])
    books.insert([1, 2, 4])
    books.match([1, 2, 3])
    assert order(books) == [(1, 2, 4), (1, 2, 3), (1, 2), (1,)]


def test_the_digest_chains_the_namespace_and_the_tokens() -> None:
    books = books_of(2)
    books.insert([1, 2, 3, 4], "space")
    root = hashlib.sha256(b"namespace:space").digest()
    first = hashlib.sha256(root + np.array([1, 2], dtype=np.int64).tobytes()).digest()
    second = hashlib.sha256(first + np.array([3, 4], dtype=np.int64).tobytes()).digest()
    assert list(cache_of(books)._blocks.index) == [first, second]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was hashed of blocks."""
    hashed: list[bytes] = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return hashlib.sha256(data).digest()

    monkeypatch.setattr(BlockTable, "digest", staticmethod(counting))
    return hashed


def test_what_is_cached_is_followed_without_hashing(hashed: list[bytes]) -> None:
    books = books_of(num_pages=300)
    books.insert(list(range(200)))
    hashed.clear()
    books.cache.match(key_of(list(range(200))))
    assert len(hashed) == 1  # the first block
    books.cache.match(key_of([*range(150), 7, 7]))
    assert len(hashed) == 3  # and the block that differs


def test_no_block_is_hashed_twice_for_one_request(hashed: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Matched while it waits, inserted chunk by chunk, matched and inserted again after its KV was evicted."""
    books = books_of(num_pages=100)
    monkeypatch.setattr(books.cache, "check", lambda: None)  # which hashes too
    tokens, memo = list(range(40)), PrefixMemo()
    books.insert([*tokens[:7], 99])
    hashed.clear()
    for _ in range(3):
        books.match(tokens, memo=memo)
    assert len(hashed) == 2  # the first block, and the one where it leaves the other prompt
    lock = books.lock(tokens, memo=memo)
    for end in (20, 30, 40):
        result = books.extend(lock, tokens[:end], memo=memo)
        longer = books.lock_handle(result.handle, tokens[:end], "", end)
        books.unlock(lock)
        lock = longer
    assert len(hashed) == len(set(hashed)) == 1 + 33  # those that followed from the other prompt were not even needed
    books.unlock(lock)
    for _ in range(2):
        books.evict(1000)
        books.match(tokens, memo=memo)
        books.insert(tokens, memo=memo)
    assert len(hashed) == 1 + 33
    books.insert([*tokens, 40], memo=memo)
    assert len(hashed) == 1 + 34


def test_a_wrong_memo_costs_reuse_and_nothing_else() -> None:
    books = books_of()
    memo = PrefixMemo()
    books.insert([1, 2, 3], "a", memo=memo)
    assert len(books.match([1, 2, 3], "b", memo=memo)) == 0
    assert len(books.cache.match(key_of([4, 5, 6], "a", memo))) == 0
    assert len(books.cache.match(key_of([1, 5, 6], "a", memo))) == 1


def test_a_memo_in_pieces_is_not_kept() -> None:
    digests = ChainDigests()
    digests.note(1, bytes(32))
    assert len(digests) == 0
    digests.note(0, b"a" * 32 + b"b" * 32)
    digests.note(1, b"c" * 32 + b"d" * 32)
    assert [digests[n][:1] for n in range(len(digests))] == [b"a", b"b", b"d"]


def test_a_path_is_extended_by_what_fits_and_while_it_is_locked() -> None:
    books = books_of(num_pages=8)
    handle = books.insert([1, 2]).handle
    slots = books.alloc(1)
    with pytest.raises(ValueError, match="not locked"):
        books.cache.extend(handle, key_of([1, 2, 3]), slots)
    books.lock_handle(handle, [1, 2], "", 2)
    for tokens in ([1], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="a path of 2 and slots"):
            books.cache.extend(handle, key_of(tokens), slots)
    books.check()


def test_extending_does_not_look_at_what_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    books = books_of(num_pages=200)
    lock = books.lock_handle(books.insert(list(range(100))).handle, list(range(100)), "", 100)
    looked_at = []
    find = BlockTable.find
    monkeypatch.setattr(BlockTable, "find", lambda self, *args: looked_at.append(len(args[0])) or find(self, *args))  # type: ignore[func-returns-value, redundant-expr]
    books.extend(lock, list(range(110)))
    assert looked_at == [10]


def test_digests_that_collide_cost_reuse_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds two blocks of one SHA-256; with one bit of it left, any two may collide."""
    monkeypatch.setattr(
        BlockTable, "digest", staticmethod(lambda data: bytes([hashlib.sha256(data).digest()[0] & 1]) * 32)
    )
    allocator = CountingAllocator(64, 1)
    cache = BlockCache(NoOptions(), type("Ctx", (), {"allocator": allocator, "page_size": 1})())
    random = np.random.default_rng(0)
    stored: dict[int, tuple[int, ...]] = {}
    taken = []
    for _ in range(50):
        tokens = random.integers(0, 3, 4)
        slots = allocator.alloc_slots(4)
        result = cache.insert(key_of(tokens.tolist()), slots)
        stored.update(
            {int(slot): tuple(tokens[: n + 1].tolist()) for n, slot in enumerate(result.slots[: result.taken])}
        )
        allocator.free(result.slots[result.taken :])
        taken.append(result.taken)
        found = cache.match(key_of(tokens.tolist()))
        assert [stored[slot] for slot in found.slots.tolist()] == [tuple(tokens[: n + 1]) for n in range(len(found))]
        assert len(found) == result.taken
        cache.check()
        assert len(allocator.held) == cache.cached_tokens
        if random.random() < 0.3:
            cache.evict(1)
    assert min(taken) < 4


def test_refusals_say_what_is_wrong() -> None:
    """What is refused is the suite's business; here is what a person reads."""
    books = books_of()
    handle = books.insert([1, 2]).handle
    slots = books.match([1, 2]).slots
    with pytest.raises(TypeError, match="not a handle of a block cache"):
        books.cache.lock(object())
    with pytest.raises(ValueError, match="other tokens"):
        books.cache.insert(key_of([3, 4]), slots)
    with pytest.raises(ValueError, match="slots outside of pages 1 to 32"):
        books.cache.insert(key_of([3]), np.array([33]))
    with pytest.raises(ValueError, match="not locked"):
        books.cache.unlock(handle)
    books.evict(1)
    with pytest.raises(ValueError, match="match it again"):
        books.cache.lock(handle)


def test_long_chains_are_followed_in_growing_looks() -> None:
    length = 10 * blocks_module.FIRST_LOOK
    books = books_of(num_pages=4 * length)
    books.insert(list(range(length)))
    for fork in (1, 15, 16, 17, 40, 100, length - 1):
        assert len(books.match([*range(fork), 9999])) == fork
        books.insert([*range(fork), 10_000 + fork])
    assert len(books.match(list(range(length)))) == length


def test_check_finds_wrong_books() -> None:
    books = books_of()
    books.insert([1, 2])
    cache = cache_of(books)
    cache._locked += 1
    with pytest.raises(AssertionError, match="0 blocks locked, 1 counted"):
        cache.check()
    cache._locked -= 1
    cache._idle.remove(cache._blocks.find(np.array([[1]]), ""))
    with pytest.raises(AssertionError, match="exactly the unlocked"):
        cache.check()
