"""Tests of reads that go well."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.plugins.kv_handoff.suite.rig import Expected, Piece, pages, ranges, recut
from pegboard.plugins.kv_handoff.suite.servers import DONE, GONE, MIB, SETTLE, Servers, TransferSuite


class ReadingTests(TransferSuite):
    """All bytes come, to the right places, however many reads there are."""

    @pytest.mark.parametrize("slot_bytes", [1, 384, 6144, 100_000])
    def test_all_bytes_and_no_others(self, servers: Servers, slot_bytes: int) -> None:
        source, reader = servers.pair([40 * slot_bytes] * 3)
        draw = np.random.default_rng(slot_bytes)
        for count in (1, 7, 30):
            there, here = (draw.permutation(40)[:count].tolist() for _ in range(2))
            self.check(source, reader, pages(3, there, slot_bytes), pages(3, here, slot_bytes))

    @properties(max_examples=40)
    @given(data=st.data())
    def test_any_pieces(self, servers: Servers, data: st.DataObject) -> None:
        """Pieces of any length from 1 byte on, cut in other places on both sides."""
        source, reader = servers.pair()
        sizes = [len(one) for one in reader.regions]
        free, target, wanted = [0] * len(sizes), list[Piece](), list[Piece]()
        for _ in range(data.draw(st.integers(1, 12), "pieces")):
            region, there = (data.draw(st.integers(0, len(sizes) - 1)) for _ in range(2))
            begin = free[region] + data.draw(st.integers(0, 40), "gap")
            nbytes = data.draw(st.sampled_from([1, 2, 3, 16, 64, 255, 256, 1000]), "bytes")
            if begin + nbytes > sizes[region]:
                continue
            free[region] = begin + nbytes
            target.append((region, begin, nbytes))
            wanted.append((there, data.draw(st.integers(0, sizes[there] - nbytes), "offset"), nbytes))
        cuts = st.lists(st.sampled_from([1, 7, 64, 128]), max_size=8)
        wanted, target = recut(wanted, data.draw(cuts)), recut(target, data.draw(cuts))
        self.check(source, reader, ranges(wanted), ranges(target))
        servers.close(reader)
        servers.close(source)

    def test_many_pieces(self, servers: Servers) -> None:
        """More of them than some engines take in a call, in several orders, and larger and smaller on one side."""
        slots, size = 3000, 48
        source, reader = servers.pair([slots * size] * 3)
        draw = np.random.default_rng(0)
        there, here = draw.permutation(slots).tolist(), draw.permutation(slots).tolist()
        self.check(source, reader, pages(3, there, size), pages(3, here, size))
        crosswise = [(region, slot * size, size) for slot in here for region in range(3)]
        self.check(source, reader, pages(3, there, size), ranges(crosswise))
        whole: list[Piece] = [(region, 0, slots * size) for region in range(3)]
        self.check(source, reader, ranges(whole), ranges(crosswise))
        self.check(source, reader, ranges(crosswise), ranges(whole))
        self.check(source, reader, ranges(recut(whole, itertools.repeat(17))), ranges(crosswise))

    def test_large_reads(self, servers: Servers) -> None:
        """Larger than what is moved at a time: whole regions, and pieces that do not fit the other side's."""
        source, reader = servers.pair([9 * MIB, 7 * MIB + 13])
        whole: list[Piece] = [(0, 0, 9 * MIB), (1, 0, 7 * MIB + 13)]
        self.check(source, reader, ranges(whole), ranges(whole))
        source.renew()
        odd = recut(whole, itertools.cycle([5 * MIB + 1, 3, 100_001]))
        self.check(source, reader, ranges(odd), ranges(recut(whole, itertools.cycle([65_537, 2 * MIB]))))

    def test_sources_may_overlap(self, servers: Servers) -> None:
        source, reader = servers.pair()
        wanted = [(0, 10, 1000), (0, 500, 1000), (0, 10, 1000), *[(1, 7, 16)] * 60]
        target = [(0, 0, 1000), (0, 1000, 1000), (0, 2000, 1000), (1, 0, 960)]
        self.check(source, reader, ranges(wanted), ranges(target))

    def test_nothing_is_read(self, servers: Servers) -> None:
        source, reader = servers.pair()
        self.check(source, reader, ranges([]), ranges([]))

    def test_regions_may_differ(self, servers: Servers) -> None:
        """The reader's memory may be laid out otherwise than the source's."""
        source, reader = servers.make([100_000]), servers.make([10, 20_000, 30_000])
        reader.connect(source)
        self.check(source, reader, ranges([(0, 60_000, 40_000)]), ranges([(2, 0, 30_000), (1, 5000, 10_000)]))

    # Several reads.

    def test_reads_beside_each_other(self, servers: Servers) -> None:
        """Of one peer, in both directions: each ends once, with its own bytes."""
        one, other = servers.pair([64 * 4096] * 2)
        other.connect(one)
        one.connect(other)
        lower, upper = np.arange(32), np.arange(32, 64)
        expected = [Expected(server.copy()) for server in (one, other)]
        handles: list[list[int]] = [[], []]
        draw = np.random.default_rng(5)
        order = draw.permutation(32)
        for slot in order.tolist():
            # Each reads the other's lower half into its own upper half, so that all may go on at once.
            wanted = pages(2, [int(lower[slot])], 4096)
            target = pages(2, [int(upper[slot])], 4096)
            for number, (reader, source) in enumerate(((one, other), (other, one))):
                expected[number].fill(target, source.bytes_at(wanted))
                handles[number].append(reader.read(wanted, target))
        for reader, some, wanted_memory in zip((one, other), handles, expected, strict=True):
            assert len(set(some)) == 32
            assert reader.wait(some, self.patience) == [DONE] * 32
            wanted_memory.check(reader)

    def test_two_peers(self, servers: Servers) -> None:
        first, second, reader = servers.make(), servers.make(), servers.make()
        reader.connect(first, "first")
        reader.connect(second, "second")
        wanted = ranges([(0, 0, 3000)])
        expected = Expected(reader.copy())
        handles = []
        for peer, server, region in (("first", first, 0), ("second", second, 1), ("first", first, 2)):
            target = ranges([(region, 0, 3000)])
            expected.fill(target, server.bytes_at(wanted))
            handles.append(reader.read(wanted, target, peer=peer))
        assert reader.wait(handles, self.patience) == [DONE] * 3
        expected.check(reader)
        servers.close(first)
        assert reader.wait([reader.read(wanted, ranges([(2, 0, 3000)]), peer="second")], self.patience) == [DONE]

    def test_two_readers(self, servers: Servers) -> None:
        source, one = servers.pair([MIB])
        two = servers.make([MIB])
        two.connect(source)
        whole = ranges([(0, 0, MIB)])
        handles = [(reader, reader.read(whole, whole)) for reader in (one, two, one, two)]
        for reader, handle in handles:
            assert reader.wait([handle], self.patience) == [DONE]
            Expected(source.copy()).check(reader)

    def test_handles_are_not_given_again(self, servers: Servers) -> None:
        source, reader = servers.pair()
        some, seen = ranges([(0, 0, 100)]), set[int]()
        for _ in range(3):
            for _ in range(20):
                handle = reader.read(some, some)
                assert handle not in seen, "a handle has been given to two reads"
                seen.add(handle)
                reader.poll()
            reader.wait(seen, self.patience)
            reader.engine.disconnect("peer")
            reader.connect(source)

    def test_each_end_is_told_once(self, servers: Servers) -> None:
        _, reader = servers.pair([MIB])
        whole = ranges([(0, 0, MIB)])
        handles = [reader.read(whole, whole) for _ in range(8)]
        for handle in handles[::2]:
            reader.engine.abandon(handle)
        states = reader.wait(handles, self.patience)
        assert states[1::2] == [DONE] * 4
        assert set(states[::2]) <= {DONE, GONE}
        for handle in handles:
            reader.engine.abandon(handle)
        end = time.monotonic() + SETTLE
        while time.monotonic() < end:
            reader.poll()  # fails where an end is told again
