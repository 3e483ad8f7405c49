"""The conformance suite of KVTransfer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.blocking import no_waiting
from pegboard.conformance.properties import properties
from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.conformance.transfer_rig import LEASE, Expected, Piece, Server, pages, ranges, recut
from pegboard.core.interfaces.kv_transfer import MAX_DESCRIPTION, Ranges, TransferError, TransferState

DONE, FAILED, GONE = TransferState.DONE, TransferState.FAILED, TransferState.GONE
MIB = 2**20
SMALL = (5000, 3000, 4096)
SETTLE = 0.05
"""Seconds in which what must not happen any more would."""


class Servers:
    """Makes servers, and ends them with the test."""

    def __init__(self, suite: KVTransferContract) -> None:
        self._suite = suite
        self._made: list[Server] = []

    def make(self, sizes: Sequence[int] = SMALL, *, lease: bool = True) -> Server:
        """Return a server that lets others read under LEASE."""
        made = Server(sizes, self._suite.build, seed=len(self._made) + 1)
        self._made.append(made)
        if lease:
            made.engine.allow(LEASE)
        return made

    def pair(self, sizes: Sequence[int] = SMALL) -> tuple[Server, Server]:
        """Return a source, and a reader that knows it as "peer"."""
        source, reader = self.make(sizes), self.make(sizes)
        reader.connect(source)
        return source, reader

    def close(self, server: Server) -> None:
        """End one now."""
        self._made.remove(server)
        server.engine.close()
        server.check_guards()

    def end(self) -> None:
        """End all."""
        for server in list(self._made):
            self.close(server)


class KVTransferContract(ContractSuite):
    """What those count on who bring KV from another server. All servers are in this process, each with an engine."""

    contract = "kv_transfer"

    patience: ClassVar[float] = 30.0
    """Seconds in which a read ends, on a busy machine and with a peer that is gone."""

    @pytest.fixture
    def servers(self) -> Iterator[Servers]:
        """Make servers of a test."""
        servers = Servers(self)
        yield servers
        servers.end()

    def check(self, source: Server, reader: Server, wanted: Ranges, target: Ranges) -> None:
        """Read, and compare everything in the reader's memory."""
        expected = Expected(reader.copy())
        expected.fill(target, source.bytes_at(wanted))
        handle = reader.read(wanted, target)
        assert reader.wait([handle], self.patience) == [DONE], reader.ended[handle].reason
        expected.check(reader)

    def check_fails(self, reader: Server, wanted: Ranges, target: Ranges, what: str, *, lease: int = LEASE) -> str:
        """Read what cannot be read; return the reason that is told."""
        handle = reader.read(wanted, target, lease=lease)
        assert reader.wait([handle], self.patience) == [FAILED], f"a read {what} has not failed"
        assert reader.ended[handle].reason, f"no reason is told for the failure of a read {what}"
        reader.check_guards()
        return reader.ended[handle].reason

    # Bytes.

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

    # What cannot be read.

    def test_a_source_beyond_the_regions_fails(self, servers: Servers) -> None:
        source, reader = servers.pair()
        target = ranges([(0, 0, 100)])
        for region, offset in ((3, 0), (-1, 0), (0, 4901), (0, 5000), (0, -1), (1, 2**62), (0, -(2**62)), (2**30, 0)):
            self.check_fails(reader, ranges([(region, offset, 100)]), target, f"of byte {offset} of region {region}")
        spread = ranges([(0, 0, 50), (2, 4090, 50)])
        self.check_fails(reader, spread, target, "of which one piece is beyond its region")
        self.check(source, reader, target, target)

    def test_a_target_beyond_the_regions_is_an_error(self, servers: Servers) -> None:
        source, reader = servers.pair()
        some = ranges([(0, 0, 100)])
        for piece in ((3, 0, 100), (-1, 0, 100), (0, 4901, 100), (0, -1, 100), (0, 2**62, 100), (1, 3000, 100)):
            with pytest.raises(ValueError):
                reader.read(some, ranges([piece]))
        with pytest.raises(ValueError):
            reader.read(some, ranges([(0, 0, 50), (1, 2990, 50)]))
        reader.poll()
        assert not reader.ended
        self.check(source, reader, some, some)

    def test_other_numbers_of_bytes_are_an_error(self, servers: Servers) -> None:
        _, reader = servers.pair()
        some = ranges([(0, 0, 100)])
        for wanted in (ranges([(0, 0, 99)]), ranges([(0, 0, 60), (0, 60, 41)]), ranges([])):
            with pytest.raises(ValueError):
                reader.read(wanted, some)
        with pytest.raises(ValueError):
            reader.read(some, ranges([(0, 0, 150), (0, 150, -50)]))
        with pytest.raises(ValueError):
            reader.read(ranges([(0, 0, 150), (0, 150, -50)]), some)

    def test_unknown_peers_are_an_error(self, servers: Servers) -> None:
        _, reader = servers.pair()
        some = ranges([(0, 0, 100)])
        with pytest.raises(TransferError):
            reader.read(some, some, peer="stranger")
        reader.engine.disconnect("stranger")
        reader.engine.disconnect("peer")
        with pytest.raises(TransferError):
            reader.read(some, some)
        reader.engine.disconnect("peer")

    def test_garbage_is_no_description(self, servers: Servers) -> None:
        source, reader = servers.pair()
        right = source.engine.describe()
        assert 0 < len(right) <= MAX_DESCRIPTION
        noise = np.random.default_rng(0).bytes(len(right))
        for wrong in (b"", b"\0", b"{}", noise, right[:-1], right[: len(right) // 2], b"x" + right, bytes(len(right)),
                      b"a" * MAX_DESCRIPTION, b"\x80\x04c__builtin__\nexec\n."):  # fmt: skip
            with pytest.raises(TransferError):
                reader.engine.connect("other", "127.0.0.1", wrong)
            with pytest.raises(TransferError):
                reader.read(ranges([]), ranges([]), peer="other")
        some = ranges([(0, 0, 100)])
        self.check(source, reader, some, some)

    def test_another_ones_description_gives_nothing(self, servers: Servers) -> None:
        """Descriptions in which a byte differs are no use."""
        source, reader = servers.pair()
        right, some = source.engine.describe(), ranges([(0, 0, 100)])
        before = reader.copy()
        for at in (0, len(right) // 2, len(right) - 1):
            wrong = bytearray(right)
            wrong[at] ^= 1
            try:
                reader.engine.connect("peer", "127.0.0.1", bytes(wrong))
            except TransferError:
                continue
            self.check_fails(reader, some, some, "with another description")
        Expected(before).check(reader)

    # Peers that go and come.

    def test_a_peer_that_is_gone_fails(self, servers: Servers) -> None:
        source, reader = servers.pair([MIB])
        whole = ranges([(0, 0, MIB)])
        self.check(source, reader, whole, whole)
        servers.close(source)
        self.check_fails(reader, whole, whole, "of a peer that is gone")
        self.check_fails(reader, whole, whole, "of a peer that is gone")

    def test_a_peer_that_never_was_fails(self, servers: Servers) -> None:
        source, reader = servers.make(), servers.make()
        description = source.engine.describe()
        servers.close(source)
        reader.engine.connect("peer", "127.0.0.1", description)
        self.check_fails(reader, ranges([(0, 0, 9)]), ranges([(0, 0, 9)]), "of a peer that is not there")

    def test_a_peer_that_goes_amid_reads(self, servers: Servers) -> None:
        """What has been read is right, and all the rest fails."""
        for delay in (0.0, 0.001, 0.004):
            source, reader = servers.pair([7 * MIB] * 4)
            whole = [ranges([(region, 0, 7 * MIB)]) for region in range(4)]
            wanted = source.copy()
            handles = [reader.read(one, one) for one in whole]
            reader.poll()
            time.sleep(delay)
            reader.poll()
            servers.close(source)
            source.renew()
            states = reader.wait(handles, self.patience)
            assert set(states) <= {DONE, FAILED}
            for state, found, data in zip(states, reader.regions, wanted, strict=True):
                assert state is FAILED or np.array_equal(found, data), "a read is DONE without all bytes"
            servers.close(reader)

    def test_a_name_may_be_given_again(self, servers: Servers) -> None:
        """Reads come from the last one that was connected under a name."""
        first, reader = servers.pair()
        second = servers.make()
        some = ranges([(0, 0, 3000)])
        self.check(first, reader, some, some)
        reader.connect(second)
        self.check(second, reader, some, some)
        reader.engine.disconnect("peer")
        reader.connect(first)
        self.check(first, reader, some, some)

    def test_a_forgotten_peers_reads_end(self, servers: Servers) -> None:
        source, reader = servers.pair([8 * MIB])
        whole = ranges([(0, 0, 8 * MIB)])
        handles = [reader.read(whole, whole) for _ in range(3)]
        reader.engine.disconnect("peer")
        states = reader.wait(handles, self.patience)
        assert set(states) <= {DONE, GONE, FAILED}
        self.check_nothing_more(source, reader)

    # Ends.

    def check_nothing_more(self, source: Server, reader: Server) -> None:
        """Fail where the reader's memory still changes, now that the source's is another one."""
        before = reader.copy()
        source.renew()
        end = time.monotonic() + SETTLE
        while time.monotonic() < end:
            reader.poll()
            source.poll()
            time.sleep(0.001)
        Expected(before).check(reader)

    @pytest.mark.parametrize(("size", "delay"), [(384, 0.0), (MIB, 0.0003), (384, 0.002), (MIB, 0.01)])
    def test_after_its_end_nothing_is_written(self, servers: Servers, size: int, delay: float) -> None:
        """Whenever a read is abandoned."""
        source, reader = servers.pair([8 * MIB // size * size] * 2)
        slots = list(range(8 * MIB // size))
        some = pages(2, slots, size)
        handles = [reader.read(some, some) for _ in range(2)]
        end = time.monotonic() + delay
        while time.monotonic() < end:
            reader.poll()
        for handle in handles:
            reader.engine.abandon(handle)
        states = reader.wait(handles, self.patience)
        assert set(states) <= {DONE, GONE}
        self.check_nothing_more(source, reader)
        self.check(source, reader, some, some)

    def test_abandoning_what_is_not_there(self, servers: Servers) -> None:
        source, reader = servers.pair()
        some = ranges([(0, 0, 100)])
        reader.engine.abandon(12345)
        reader.engine.abandon(-1)
        self.check(source, reader, some, some)
        for handle in list(reader.ended):
            reader.engine.abandon(handle)
        self.check(source, reader, some, some)

    def test_closing_ends_everything(self, servers: Servers) -> None:
        source, reader = servers.pair([8 * MIB])
        reader.connect(source)
        source.connect(reader)
        whole = ranges([(0, 0, 8 * MIB)])
        reader.read(whole, whole)
        back = source.read(ranges([(0, 0, 4 * MIB)]), ranges([(0, 4 * MIB, 4 * MIB)]))
        reader.poll()
        servers.close(reader)
        before = reader.copy()
        source.renew()
        time.sleep(SETTLE)
        assert source.wait([back], self.patience)[0] in (DONE, FAILED)
        Expected(before).check(reader)

    # The loop.

    def test_no_call_waits(self, servers: Servers) -> None:
        source, reader = servers.pair([4 * MIB])
        whole = ranges([(0, 0, 4 * MIB)])
        self.check(source, reader, whole, whole)
        with no_waiting("describe"):
            description = source.engine.describe()
        with no_waiting("connect"):
            reader.engine.connect("peer", "127.0.0.1", description)
        with no_waiting("allow"):
            source.engine.allow(LEASE + 1)
        handles = []
        for _ in range(3):
            with no_waiting("read"):
                handles.append(reader.read(whole, whole))
        with no_waiting("poll"):
            reader.poll()
        with no_waiting("abandon"):
            reader.engine.abandon(handles[0])
        with no_waiting("revoke"):
            source.engine.revoke(LEASE + 1)
        with no_waiting("disconnect"):
            reader.engine.disconnect("peer")
        reader.wait(handles, self.patience)

    def test_figures_are_plain(self, servers: Servers) -> None:
        source, reader = servers.pair()
        some = ranges([(0, 0, 100)])
        self.check(source, reader, some, some)
        self.check_fails(reader, ranges([(9, 0, 100)]), some, "beyond the regions")
        for server in (source, reader):
            for name, value in server.engine.stats().items():
                assert isinstance(name, str)
                assert isinstance(value, int | float)

    # Leases.

    @capability("fenced")
    def test_only_leases_are_read_under(self, servers: Servers) -> None:
        source, reader = servers.make(lease=False), servers.make(lease=False)
        reader.connect(source)
        some = ranges([(0, 0, 100)])
        before = reader.copy()
        self.check_fails(reader, some, some, "without a lease")
        source.engine.allow(LEASE + 1)
        self.check_fails(reader, some, some, "under another lease")
        Expected(before).check(reader)
        source.engine.allow(LEASE)
        self.check(source, reader, some, some)
        source.engine.revoke(LEASE + 1)
        self.check(source, reader, some, some)
        source.engine.revoke(LEASE)
        source.engine.revoke(LEASE)
        before = reader.copy()
        self.check_fails(reader, some, some, "under a lease that has ended")
        Expected(before).check(reader)
        source.engine.revoke(99)

    @capability("fenced")
    def test_leases_are_numbers_of_any_kind(self, servers: Servers) -> None:
        source, reader = servers.pair()
        some = ranges([(0, 0, 100)])
        for lease in (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1):
            self.check_fails(reader, some, some, f"under the lease {lease}, which is not there", lease=lease)
            source.engine.allow(lease)
            assert reader.wait([reader.read(some, some, lease=lease)], self.patience) == [DONE]

    @capability("fenced")
    @pytest.mark.parametrize("size", [384, MIB], ids=["small", "large"])
    def test_what_is_done_was_read_before_the_lease_ended(self, servers: Servers, size: int) -> None:
        """Whenever a lease ends amid reads: bytes that were written after its end are in none that is DONE."""
        source, reader = servers.pair([8 * MIB // size * size] * 2)
        some = [ranges([(region, slot * size, size) for slot in range(8 * MIB // size)]) for region in range(2)]
        seen = set[TransferState]()
        for number, delay in enumerate(np.linspace(0.0, 0.02, 12).tolist()):
            lease = 100 + number
            source.engine.allow(lease)
            wanted = [source.bytes_at(one) for one in some]
            handles = [reader.read(one, one, lease=lease) for one in some]
            end = time.monotonic() + delay
            while time.monotonic() < end:
                reader.poll()
            source.engine.revoke(lease)
            source.renew()
            states = reader.wait(handles, self.patience)
            assert set(states) <= {DONE, FAILED}
            for one, data, state in zip(some, wanted, states, strict=True):
                if state is DONE:
                    assert np.array_equal(reader.bytes_at(one), data), "a read is DONE with bytes from after its lease"
            seen |= set(states)
        assert FAILED in seen, "no read was caught by the end of its lease"
        self.check(source, reader, some[0], some[0])

    @lacks("fenced")
    def test_without_fences_leases_are_not_looked_at(self, servers: Servers) -> None:
        source, reader = servers.make(lease=False), servers.make(lease=False)
        reader.connect(source)
        some = ranges([(0, 0, 100)])
        self.check(source, reader, some, some)
        source.engine.allow(LEASE)
        source.engine.revoke(LEASE)
        self.check(source, reader, some, some)
