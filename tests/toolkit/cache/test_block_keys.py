from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.keys import PrefixKey, PrefixMemo
from pegboard.toolkit.cache import block_keys
from pegboard.toolkit.cache.block_keys import BlockKeys

IDENTITY = b"a model in bfloat16"


def tokens_of(count: int, first: int = 0) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64) * 7919 - 5  # the first is negative, as of a picture


def test_keys_are_a_chain_that_begins_with_framed_fields() -> None:
    """Written out here once more: another program would find them too."""
    key = PrefixKey(tokens_of(8), "salt:blå")
    name = "salt:blå".encode()
    seed = hashlib.sha256(
        b"pegboard-kv-1" + len(IDENTITY).to_bytes(4, "little") + IDENTITY + len(name).to_bytes(4, "little") + name
    ).digest()
    expected = []
    for block in (key.tokens[:4], key.tokens[4:]):
        data = b"".join(int(token).to_bytes(8, "little", signed=True) for token in block)
        seed = hashlib.sha256(seed + data).digest()
        expected.append(seed)
    assert BlockKeys(IDENTITY, 4).of(key, 2) == expected
    assert BlockKeys(IDENTITY, 4).of(PrefixKey(key.tokens.astype(">i8"), key.namespace), 2) == expected


def test_no_field_runs_over_into_the_next() -> None:
    """Two tenants whose fields and tokens are the same bytes, one after the other, have no key in common."""
    bytes_of = [int.from_bytes(text, "little") for text in (b"salt:one", b"salt:two", b"whatever")]
    cases = [
        (b"model", "salt:one", bytes_of[1:]),
        (b"model", "salt:onesalt:two", bytes_of[2:]),
        (b"model", "", bytes_of),
        (b"models", "alt:one", bytes_of[1:]),
        (b"modelsalt:one", "", bytes_of[1:]),
        (b"", "modelsalt:one", bytes_of[1:]),
    ]
    seen: set[bytes] = set()
    for identity, namespace, tokens in cases:
        for block in (1, 2):
            keys = BlockKeys(identity, block).of(PrefixKey(np.array(tokens), namespace), len(tokens) // block)
            assert not seen & set(keys)
            seen |= set(keys)


def test_every_token_of_the_past_counts() -> None:
    tokens = tokens_of(12)
    keys = BlockKeys(IDENTITY, 4)
    plain = keys.of(PrefixKey(tokens), 3)
    for place in range(12):
        other = tokens.copy()
        other[place] += 1 << 40
        changed = keys.of(PrefixKey(other), 3)
        assert [a == b for a, b in zip(plain, changed, strict=True)] == [block < place // 4 for block in range(3)]


def test_a_memo_changes_nothing_and_no_block_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a sequence that grows, asked for in any pieces, with several makers and namespaces on one memo."""
    hashed: list[int] = []
    chain = block_keys.chain

    def counted(before: bytes, blocks: NDArray[np.int64]) -> list[bytes]:
        hashed.append(len(blocks))
        return chain(before, blocks)

    monkeypatch.setattr(block_keys, "chain", counted)
    tokens, memo = tokens_of(100), PrefixMemo()
    for maker in (BlockKeys(IDENTITY, 8), BlockKeys(IDENTITY, 16), BlockKeys(b"another", 8)):
        for namespace in ("", "salt:a"):
            hashed.clear()
            whole = maker.of(PrefixKey(tokens, namespace), 100 // maker.block)
            assert hashed == [100 // maker.block]
            hashed.clear()
            for length, start, stop in ((40, 1, 2), (40, 0, 2), (100, 3, 4), (70, 2, 4), (100, 0, 6), (100, 5, 6)):
                found = maker.of(PrefixKey(tokens, namespace, memo).head(length), stop, start)
                assert found == whole[start:stop]
            assert sum(hashed) == 6


def test_what_is_no_whole_block_has_no_key() -> None:
    keys = BlockKeys(IDENTITY, 4)
    assert keys.of(PrefixKey(tokens_of(7)), 0) == keys.of(PrefixKey(tokens_of(7)), 1, 1) == []
    for start, stop in ((0, 2), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="of 7 tokens, in blocks of 4"):
            keys.of(PrefixKey(tokens_of(7), "", PrefixMemo()), stop, start)
    with pytest.raises(ValueError, match="at least one token"):
        BlockKeys(IDENTITY, 0)
