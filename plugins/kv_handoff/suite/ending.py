"""Tests of reads that end otherwise, and of what ends them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pegboard.conformance.suite import capability, lacks
from pegboard.plugins.kv_handoff.api.transfer import TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, Expected, pages, ranges
from pegboard.plugins.kv_handoff.suite.servers import DONE, FAILED, GONE, MIB, SETTLE, Servers, TransferSuite


class EndingTests(TransferSuite):
    """Peers go, reads are abandoned, leases and engines end: then nothing is written any more."""

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
    def test_a_lease_may_be_allowed_again(self, servers: Servers) -> None:
        """Reads under way go on, and its end is the end of all of them."""
        source, reader = servers.pair([4 * MIB // 384 * 384])
        whole = pages(1, range(4 * MIB // 384), 384)
        handles = [reader.read(whole, whole) for _ in range(2)]
        for _ in range(10):
            reader.poll()
            source.engine.allow(LEASE)
        assert reader.wait(handles, self.patience) == [DONE, DONE]
        wanted, seen = source.bytes_at(whole), set[TransferState]()
        for number, delay in enumerate(np.linspace(0.0, 0.006, 24).tolist()):
            lease = 100 + number
            source.engine.allow(lease)
            handle, end = reader.read(whole, whole, lease=lease), time.monotonic() + delay
            while time.monotonic() < end:
                reader.poll()
            source.engine.allow(lease)
            source.engine.revoke(lease)
            source.renew()
            state = reader.wait([handle], self.patience)[0]
            assert state is FAILED or np.array_equal(reader.bytes_at(whole), wanted), "allowed twice, it ends twice"
            wanted, seen = source.bytes_at(whole), seen | {state}
        assert FAILED in seen, "no read was caught by the end of its lease"

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
