"""Frames, the handshake and links, and what attackers send."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc

import msgspec
import pytest

from pegboard.plugins.disagg.frames import FrameReader, FrameTooLong, framed
from pegboard.plugins.disagg.handshake import MAX_REASON, Answering, Connecting, Self, differing, refusal
from pegboard.plugins.disagg.link import Link, LinkLimits
from pegboard.plugins.disagg.messages import (
    MAX_FRAME,
    MAX_OPENING,
    VERSION,
    AboutRooms,
    Facts,
    Gone,
    Hello,
    NotAMessage,
    Ping,
    Proof,
    Ready,
    Taken,
    Want,
    decode,
    encode,
)

FACTS = Facts(b"identity", {"model": "toy", "dtype": "bfloat16"}, "Engine", (2, 2), (4, 4))
SECRET = b"sixteen bytes ok"
WANT = Want(7, 0, 1, 20)


def own(role: str, secret: bytes = SECRET, facts: Facts = FACTS, name: bytes = b"") -> Self:
    return Self(role, (name or role.encode()).ljust(16, b"."), facts, b"how to read here", secret)


def pair(decode_self: Self | None = None, prefill_self: Self | None = None) -> tuple[Link, Link]:
    return Link(Connecting(decode_self or own("decode")), 0.0), Link(Answering(prefill_self or own("prefill")), 0.0)


def talk(one: Link, other: Link, now: float = 0.0) -> list[AboutRooms]:
    """Carry bytes to and fro until both are silent; return what was said about rooms."""
    said: list[AboutRooms] = []
    data = one.output(), other.output()
    while any(data):
        said += [*other.receive(data[0], now), *one.receive(data[1], now)]
        data = one.output(), other.output()
    return said


def opened() -> tuple[Link, Link]:
    one, other = pair()
    talk(one, other)
    assert one.peer is not None
    assert other.peer is not None
    return one, other


# ---- what should work ------------------------------------------------------------------------------------------------


def test_both_learn_who_the_other_is() -> None:
    one, other = opened()
    assert one.peer is not None
    assert other.peer is not None
    assert (one.peer.role, one.peer.description) == ("prefill", b"how to read here")
    assert (other.peer.role, other.peer.description) == ("decode", b"")
    one.send(WANT)
    other.send(Gone(7, 0, 1, 0))
    assert talk(one, other) == [WANT, Gone(7, 0, 1, 0)]


def test_bytes_may_come_one_by_one() -> None:
    one, other = links = pair()
    for _ in range(4):
        for data, to in ((one.output(), other), (other.output(), one)):
            for byte in data:
                assert not to.receive(bytes([byte]), 0.0)
    assert all(link.peer is not None for link in links)


def test_without_a_secret_on_both_sides() -> None:
    one, other = pair(own("decode", b""), own("prefill", b""))
    talk(one, other)
    assert one.peer is not None
    assert other.peer is not None


def test_pings_keep_a_link_and_silence_ends_it() -> None:
    one, other = opened()
    for tenths in range(200):
        one.tick(tenths / 10)
        other.tick(tenths / 10)
        talk(one, other, tenths / 10)
    assert [one.reason, other.reason] == ["", ""]
    for tenths in range(200, 270):
        one.tick(tenths / 10)
        one.output()
    assert "nothing heard" in one.reason


# ---- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "fields"),
    [
        (msgspec.structs.replace(FACTS, described={"model": "toy", "dtype": "float32"}), ("dtype",)),
        (msgspec.structs.replace(FACTS, engine="Other", head_bytes=(4, 2)), ("engine", "head_bytes")),
        (msgspec.structs.replace(FACTS, heads=(1, 2)), ("heads",)),
        (msgspec.structs.replace(FACTS, identity=b"other"), ("identity",)),
        (msgspec.structs.replace(FACTS, size=2), ("size",)),
        (msgspec.structs.replace(FACTS, dp_size=2), ("dp_size",)),
    ],
)
def test_what_differs_is_named(facts: Facts, fields: tuple[str, ...]) -> None:
    one, other = pair(own("decode", facts=facts))
    talk(one, other)
    for link in (one, other):
        assert link.over
        assert link.refused
        assert link.peer is None
        assert all(field in link.reason for field in fields)


def test_a_refusal_can_be_read_on_both_sides() -> None:
    """It has each value with its server, in the same order wherever it was found, and says what to set."""
    prefill = Facts(b"a", {"numerics 0": "cpu_native", "dtype": "bfloat16"}, "E", (3,) * 60, (128,) * 60)
    decode = Facts(b"b", {"numerics 0": "", "dtype": "bfloat16", "kept as": "fp8"}, "E", (3,) * 60, (64,) * 59 + (32,))
    told = (
        "KV differs (head_bytes: 128 in 60 regions on prefill, 64 in 59 regions, 32 in 1 region on decode; "
        "kept as: - on prefill, fp8 on decode; numerics 0: cpu_native on prefill, - on decode). "
        "Set alike on both servers: memory.kv_dtype, runner.use"
    )
    one, other = pair(own("decode", facts=decode), own("prefill", facts=prefill))
    talk(one, other)
    assert [one.reason, other.reason] == [told, told]
    assert refusal(differing(decode, prefill), "decode").reason == told


def test_a_refusal_is_no_longer_than_what_is_shown_of_it() -> None:
    """Whatever the values: what to set alike comes at the end."""
    here = Facts(b"a", {}, "E" * 999, tuple(range(1, 90)), tuple(range(90, 179)))
    described = {"config": "c" * 999} | {f"numerics {place}": "n" * 999 for place in range(99)}
    there = Facts(b"b", described, "F" * 999, tuple(range(2, 91)), (7,) * 89)
    reason = refusal(differing(here, there), "prefill").reason
    assert len(reason) < MAX_REASON
    assert "and 95 more). Set alike on both servers: model.path, memory.kv_dtype, runner.use, spec" in reason


def test_a_long_list_of_differences_is_cut() -> None:
    many = {f"field{i}": "x" * 10_000 for i in range(1000)}
    one, other = pair(own("decode", facts=msgspec.structs.replace(FACTS, described=many)))
    # More than the opening may have: it is refused before it is compared.
    talk(one, other)
    assert other.over
    assert other.peer is None


@pytest.mark.parametrize(("here", "there"), [(SECRET, b"another secret!!"), (SECRET, b""), (b"", SECRET)])
def test_another_secret(here: bytes, there: bytes) -> None:
    one, other = pair(own("decode", here), own("prefill", there))
    talk(one, other)
    assert one.over
    assert one.peer is None
    assert other.peer is None
    assert "secret_file" in one.reason


@pytest.mark.parametrize("role", ["prefill", "nothing"])
def test_a_role_that_does_not_fit(role: str) -> None:
    one, other = pair(own(role, name=b"x"))
    talk(one, other)
    assert other.over
    assert "role" in other.reason or "both sides" in other.reason


def test_another_version() -> None:
    _, other = pair()
    hello = Hello(VERSION + 1, "decode", b"i" * 16, b"n" * 32)
    other.receive(framed(encode(hello)), 0.0)
    assert f"version is {VERSION} on prefill, {VERSION + 1} on the other side" in other.reason
    assert b"version" in other.output()


# ---- attacks ---------------------------------------------------------------------------------------------------------


def test_an_unsigned_peer_learns_nothing_about_the_memory() -> None:
    """The description is how a pool is read: it is told to those who have signed only."""
    one, other = pair(own("decode", b"not the secret!!"))
    data = one.output()
    other.receive(data, 0.0)
    answer = other.output()
    assert b"how to read here" not in answer
    assert b"toy" not in answer
    proof = Proof(FACTS, b"\0" * 32)
    other.receive(framed(encode(proof)), 0.0)
    assert other.over
    assert b"how to read here" not in other.output()


def test_a_recorded_handshake_is_of_no_use() -> None:
    one, other = pair()
    hello = one.output()
    other.receive(hello, 0.0)
    one.receive(other.output(), 0.0)
    proof = one.output()
    other.receive(proof, 0.0)
    assert other.peer is not None
    again = Link(Answering(own("prefill")), 0.0)
    again.receive(hello, 0.0)
    again.receive(proof, 0.0)
    assert again.over
    assert again.peer is None


def test_a_prefill_server_that_only_mirrors_is_refused() -> None:
    """Sending back what it is sent proves nothing."""
    one, _ = pair()
    one.receive(one.output(), 0.0)
    assert one.over


@pytest.mark.parametrize("seed", range(20))
def test_rubbish_ends_a_link(seed: int) -> None:
    luck = random.Random(seed)
    for link in (*pair(), *opened()):
        rubbish = framed(luck.randbytes(luck.randrange(1, 300)))
        link.receive(rubbish if seed % 2 else rubbish[4:] + b"\xff" * 8, 0.0)
        assert link.over or link.peer is not None
        assert link.peer is None or link.over or not link.receive(b"", 0.0)


def test_every_cut_and_changed_message_is_refused_or_understood() -> None:
    luck = random.Random(3)
    whole = encode(Ready(1, 0, 1, 0, 5, 0, 4, b"\1\0\0\0\4\0\0\0"))
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(luck.randrange(1, 4)):
            data[luck.randrange(len(data))] = luck.randrange(256)
        with contextlib.suppress(NotAMessage):
            decode(bytes(data[: luck.randrange(1, len(data) + 1)]))


def test_deep_nesting_is_not_a_crash() -> None:
    with pytest.raises(NotAMessage):
        decode(b"\x91" * 200_000)


@pytest.mark.parametrize("length", [MAX_OPENING + 1, 2**31, 2**32 - 1])
def test_a_long_frame_is_refused_by_its_length_alone(length: int) -> None:
    tracemalloc.start()
    try:
        for link in pair():
            link.receive(struct.pack(">I", length), 0.0)
            assert link.over
            assert str(length) in link.reason
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_frames_are_longer_after_the_handshake_and_not_without_end() -> None:
    one, other = opened()
    one.send(Want(1, 0, 1, 5))
    hidden = Ready(1, 0, 1, 0, 5, 0, 0, b"\0" * (3 * 2**20))
    other.send(hidden)
    assert len(talk(one, other)) == 2
    one.receive(struct.pack(">I", MAX_FRAME + 1), 0.0)
    assert one.over


def test_a_reader_says_so_before_it_takes_any_of_it() -> None:
    reader = FrameReader(10)
    reader.feed(framed(b"0123456789") + struct.pack(">I", 11))
    assert reader.next() == b"0123456789"
    with pytest.raises(FrameTooLong):
        reader.next()


def test_a_slow_hello_has_five_seconds() -> None:
    one, other = pair()
    data = one.output()
    for second, byte in enumerate(data[:5]):
        other.receive(bytes([byte]), second)
        other.tick(second)
        assert not other.over
    other.tick(5.0)
    assert other.over


def test_a_frame_that_trickles_does_not_keep_a_link() -> None:
    """Only whole frames are a sign of life."""
    one, other = opened()
    other.send(Gone(1, 0, 1, 0))
    data = other.output()
    for second, byte in enumerate(data[: min(len(data) - 1, 8)]):
        one.receive(bytes([byte]), float(second))
        one.tick(float(second))
    assert one.over


def test_a_peer_that_takes_nothing_is_lost() -> None:
    one, _ = opened()
    one.waiting(LinkLimits().unsent)
    assert not one.over
    one.waiting(LinkLimits().unsent + 1)
    assert one.over


@pytest.mark.parametrize("message", [Hello(VERSION, "decode", b"i" * 16, b"n" * 32), Gone(1, 0, 1, 0)])
def test_what_a_decode_server_may_not_say(message: Hello | Gone) -> None:
    _, other = opened()
    assert not other.receive(framed(encode(message)), 0.0)
    assert other.over


def test_nothing_about_rooms_before_the_handshake() -> None:
    for message in (WANT, Taken(1, 0, 1, 0, 5, True), Ping(1)):
        _, other = pair()
        assert not other.receive(framed(encode(message)), 0.0)
        assert other.over
        assert other.refused


def test_after_the_end_nothing_is_heard() -> None:
    one, other = opened()
    one.send(WANT)
    data = one.output()
    other.receive(struct.pack(">I", 2**32 - 1), 0.0)
    assert not other.receive(data, 0.0)
