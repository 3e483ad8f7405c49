"""The conformance suite of KVTransfer."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.rig.blocking import no_waiting
from pegboard.plugins.kv_handoff.api.transfer import MAX_DESCRIPTION, TransferError
from pegboard.plugins.kv_handoff.suite.ending import EndingTests
from pegboard.plugins.kv_handoff.suite.reading import ReadingTests
from pegboard.plugins.kv_handoff.suite.rig import LEASE, Expected, ranges
from pegboard.plugins.kv_handoff.suite.servers import MIB, Servers


class KVTransferContract(ReadingTests, EndingTests):
    """What those count on who bring KV from another server."""

    contract = "kv_transfer"

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
