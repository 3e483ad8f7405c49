"""What a storage makes of blocks that are damaged: a part of the suite of KVStorage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pytest

from pegboard.conformance.suite import capability
from pegboard.plugins.kv_tiers.suite.storage_rig import BLOCK, StorageRig, Stores, Talk, numbered

DAMAGE: Mapping[str, Callable[[bytes], bytes | None]] = MappingProxyType(
    {
        "gone": lambda whole: None,
        "empty": lambda whole: b"",
        "cut_off": lambda whole: whole[: len(whole) // 2],
        "cut_off_by_a_byte": lambda whole: whole[:-1],
        "a_header_alone": lambda whole: whole[:-BLOCK],
        "too_long": lambda whole: whole + b"\0",
        "zeros": lambda whole: bytes(len(whole)),
        "torn": lambda whole: whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2),
        "something_else": lambda whole: b"\x80\x04." + whole[3:],
    }
)
"""Kinds of damage, each with what it makes of the bytes that stand for a block; None: they vanish."""


class DamageTests(StorageRig):
    """A block that is damaged is a miss and is removed, where the class says how to damage one."""

    def check_miss(self, talk: Talk, keys: Sequence[bytes], damaged: int, data: bytes | None, what: str) -> None:
        """Put bytes in the place of one block: it and what follows do not count; it is removed, and can be written."""
        self.put_raw(talk.storage, keys[damaged], data)
        assert talk.read(keys) == damaged, f"a block that is {what} is read"
        assert self.raw(talk.storage, keys[damaged]) is None, f"a block that is {what} is not removed"
        assert talk.has(keys) == damaged, f"exists counts a block that is {what}, after get has met it"
        assert talk.put(keys) == len(keys), f"a block that is {what} cannot be written again"
        talk.holds(keys)

    @pytest.mark.parametrize("kind", DAMAGE)
    def test_damaged_blocks_are_misses(self, stores: Stores, kind: str) -> None:
        unknown = self.impossible.keys() - DAMAGE.keys()
        assert not unknown, f"impossible names {sorted(unknown)}; kinds of damage are {', '.join(DAMAGE)}"
        if kind in self.impossible:
            pytest.skip(f"a block cannot be {kind}: {self.impossible[kind]}")
        talk, keys = stores.open(), numbered(4)
        talk.put(keys)
        whole = self.raw(talk.storage, keys[2])
        assert whole is not None, "raw() has nothing for a block that was written"
        self.check_miss(talk, keys, 2, DAMAGE[kind](whole), f"damaged ({kind})")

    @capability("persistent")
    def test_damage_costs_its_block_alone(self, stores: Stores) -> None:
        """Also after a restart: the last byte of one block is another one, and those after it are there."""
        keys = numbered(5)

        def damage(talk: Talk) -> None:
            talk.written(keys)
            whole = self.raw(talk.storage, keys[1])
            assert whole is not None, "raw() has nothing for a block that was written"
            self.put_raw(talk.storage, keys[1], whole[:-1] + bytes([whole[-1] ^ 1]))

        talk = stores.after("closed", damage)
        assert talk.read(keys[1:2]) == 0, "a block whose last byte was changed is read, after a restart"
        talk.holds([*keys[:1], *keys[2:]], "though only another one was damaged before a restart")

    def test_no_bit_may_flip(self, stores: Stores) -> None:
        talk, keys = stores.open(24), numbered(1)
        talk.put(keys)
        whole = self.raw(talk.storage, keys[0])
        assert whole is not None, "raw() has nothing for a block that was written"
        assert len(whole) >= 24, f"raw() has {len(whole)} bytes for a block of 24"
        for at in range(len(whole)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << (at % 8)
            self.check_miss(talk, keys, 0, bytes(flipped), f"changed in byte {at} of {len(whole)}")

    def test_blocks_cannot_be_exchanged(self, stores: Stores) -> None:
        """Neither with those of another key, nor with those of another identity, which have the same key."""
        one, other = stores.open(), stores.open(identity=secrets.token_hex(32), salt=1)
        keys = numbered(3)
        one.put(keys)
        other.put(keys)
        foreign = (
            (one, keys[0], "another key's"),
            (one, keys[2], "another key's"),
            (other, keys[1], "another model's"),
        )
        for talk, key, what in foreign:
            self.check_miss(one, keys, 1, self.raw(talk.storage, key), what)
