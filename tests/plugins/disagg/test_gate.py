"""What the gate says to requests, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pegboard.conformance.admission_gate import gated_request
from pegboard.core.interfaces.admission_gate import AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.req import Req
from pegboard.plugins.disagg.gate import DisaggGate
from pegboard.plugins.disagg.held import Held
from pegboard.plugins.disagg.messages import RoomKey
from pegboard.plugins.disagg.options import DisaggOptions
from pegboard.plugins.disagg.prefill_room import PrefillRoom
from pegboard.plugins.kv_handoff.api.transfer import TransferState
from tests.plugins.disagg.world import ADDRESS, Setup, World

SAID = {"bootstrap_host": ADDRESS.host, "bootstrap_port": ADDRESS.port, "bootstrap_room": 2**63 - 1}


STATES = ("bootstrapping", "waiting", "transferring")


def entered(role: str, said: Mapping[str, Any] | None, **options: Any) -> Verdict | None:
    """Return what a gate says; None where it is not concerned."""
    server = World().server(role)
    made = DisaggOptions.model_validate({"role": role, **options})
    gate = DisaggGate(made, server.made.ctx, server.end)
    req = gated_request({} if said is None else {"disagg": said})
    return gate.enter(req) if gate.concerns(req) else None


def failed(verdict: Verdict | None) -> tuple[int, str, str]:
    assert verdict is not None
    assert verdict.state is GateState.FAILED, verdict
    return verdict.status, verdict.code, verdict.param


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bootstrap_room", -1),
        ("bootstrap_room", 2**63),
        ("bootstrap_room", True),
        ("bootstrap_room", "7"),
        ("bootstrap_room", None),
        ("bootstrap_port", 0),
        ("bootstrap_port", 65536),
        ("bootstrap_host", ""),
        ("bootstrap_host", "x" * 256),
        ("bootstrap_host", "a\nb"),
        ("bootstrap_host", 3),
        ("index", -1),
        ("index", 1.5),
    ],
)
def test_malformed_fields(role: str, field: str, value: object) -> None:
    assert failed(entered(role, {**SAID, field: value})) == (400, "invalid_bootstrap", field)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_a_room(role: str) -> None:
    nothing = {"bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None}
    for said in (None, nothing, {"index": 1}):
        assert entered(role, said) is None
        assert failed(entered(role, said, allow_plain=False)) == (400, "room_required", "bootstrap_room")


def test_what_decode_may_connect_to() -> None:
    for host in ("10.0.0.1", "127.0.0.1.evil.example", "169.254.169.254", "LOCALHOST.evil"):
        assert failed(entered("decode", {**SAID, "bootstrap_host": host}))[1] == "peer_not_allowed"
    allowed = {"peers": ("127.0.0.1:7000", "Localhost", "::1")}
    for host, port, right in [
        ("127.0.0.1", 7000, True),
        ("127.0.0.1", 7001, False),
        ("localhost", 1, True),
        ("::1", 9, True),
    ]:
        verdict = entered("decode", {**SAID, "bootstrap_host": host, "bootstrap_port": port}, **allowed)
        assert verdict is not None
        assert (verdict.state is GateState.BLOCKED) is right
    assert failed(entered("decode", {"bootstrap_room": 1})) == (400, "invalid_bootstrap", "bootstrap_host")


def test_embeddings_are_plain() -> None:
    gate = World().prefill.made
    assert not gate.concerns(gated_request({"disagg": SAID}, samples=False))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_room_in_use(role: str) -> None:
    gate = World().server(role).made
    first = gated_request({"disagg": SAID})
    gate.enter(first)
    assert failed(gate.enter(gated_request({"disagg": SAID}))) == (409, "room_in_use", "bootstrap_room")
    assert gate.enter(gated_request({"disagg": {**SAID, "index": 1}})).state is not GateState.FAILED
    gate.cancel(first)
    assert gate.enter(gated_request({"disagg": SAID})).state is not GateState.FAILED


# ---- what happens to rooms -------------------------------------------------------------------------------------------


def run(world: World, turns: int = 20, wait: float = 0.1) -> None:
    for _ in range(turns):
        world.work()
        world.end_read(0, True)
        world.wait(wait)
        world.check()


def ends(world: World, role: str) -> list[str]:
    return list(world.answers[role].values())


def test_a_question_before_its_request() -> None:
    world = World()
    world.post(20, "decode", room=7, seed=3)
    run(world)
    world.post(20, "prefill", room=7, seed=3)
    run(world)
    assert (ends(world, "prefill"), ends(world, "decode")) == (["length"], ["length"])
    world.check_settled()


def test_a_request_that_comes_to_prefill_alone_is_answered_and_let_go() -> None:
    world = World()
    world.post(20, "prefill")
    run(world)
    assert ends(world, "prefill") == ["length"]
    assert world.prefill.left
    run(world, 40, 1.0)
    world.check_settled()


@pytest.mark.parametrize(("on_loss", "end"), [("fail", "no_request"), ("compute", "length")])
def test_a_request_that_comes_to_decode_alone_has_most_of_a_minute(on_loss: str, end: str) -> None:
    """Prefill gives it up before decode does: it can say why."""
    world = World(Setup(on_loss=on_loss))
    world.post(20, "decode")
    run(world, 48, 1.0)
    assert ends(world, "decode") == []
    run(world, 8, 1.0)
    assert ends(world, "decode") == [end]
    world.check_settled()


def test_what_a_request_waits_for_is_told() -> None:
    verdict = entered("decode", SAID)
    assert verdict is not None
    assert verdict.reason == f"waiting for the prefill server {ADDRESS} to say that it has this room's request"


def test_another_prompt_on_the_other_side() -> None:
    world = World()
    world.post(20, alike=False)
    run(world)
    assert ends(world, "decode") == ["prompt_differs"]
    world.check_settled()


@pytest.mark.parametrize(("on_loss", "end"), [("fail", "prefill_unreachable"), ("compute", "length")])
def test_no_prefill_server(on_loss: str, end: str) -> None:
    world = World(Setup(on_loss=on_loss))
    world.up = False
    world.post(20, "decode")
    run(world)
    assert ends(world, "decode") == [end]


@pytest.mark.parametrize(("on_loss", "end"), [("fail", "prefill_lost"), ("compute", "length")])
def test_prefill_starts_anew_while_it_is_read_from(on_loss: str, end: str) -> None:
    world = World(Setup(on_loss=on_loss))
    world.post(20)
    for _ in range(8):
        world.work()
    assert world.reads()
    world.kill("prefill")
    for _ in range(4):
        world.work()
    if on_loss == "compute":
        assert ends(world, "decode") == [], "its memory may still be written to"
    world.decode.transfer.end(world.reads()[0], TransferState.GONE)
    run(world)
    assert ends(world, "decode") == [end]
    world.check_settled()


def test_a_read_that_never_ends_keeps_its_memory() -> None:
    """As of a stopped peer: the request is answered in time, and its pages are not given away."""
    world = World()
    world.post(20)
    for _ in range(8):
        world.work()
    read = world.reads()[0]
    for _ in range(70):
        world.work()
        world.wait(1.0)
    assert ends(world, "decode") != []
    assert world.decode.made.stats()["seats_quarantined"] == 1
    assert any(world.decode.pages.values())
    world.decode.transfer.end(read, TransferState.GONE)
    run(world)
    world.check_settled()


def test_a_decode_server_that_is_gone_costs_prefill_five_seconds() -> None:
    world = World()
    world.post(20)
    for _ in range(8):
        world.work()
    world.kill("decode")
    for _ in range(3):
        world.work()
        world.wait(1.0)
    assert world.prefill.left, "it may come back"
    for _ in range(4):
        world.work()
        world.wait(1.0)
    world.check_settled()


def test_a_room_that_has_ended_says_so_to_the_late() -> None:
    """Decode asks when prefill has given the request up, and need not wait for its time to run out."""
    world = World()
    world.post(20, "prefill", room=5, seed=3)
    world.abort("prefill", 0)
    world.post(20, "decode", room=5, seed=3)
    for _ in range(6):
        world.work()
        world.wait(0.1)
    assert ends(world, "decode") == ["prefill_failed"]
    world.check_settled()


def test_a_stopped_prefill_server_is_waited_for_until_it_is_lost() -> None:
    """And no longer: another connection would not be answered either. Nothing is dialled for the request."""
    world = World()
    world.post(20, "decode")
    world.work()
    world.stop("prefill")
    for _ in range(5):
        world.wait(1.0)
        world.step("decode")
    assert not ends(world, "decode")
    world.wait(1.0)
    world.step("decode")
    assert ends(world, "decode") == ["prefill_lost"]
    assert not world.decode.end.dialled
    world.settle()
    world.check_settled()


def late(world: World) -> None:
    """Let decode hear nothing for so long that prefill lets go of its rooms, and then connect again."""
    world.stop("decode")
    for _ in range(40):
        world.wait(1.0)
        world.step("prefill")
    world.go_on()


def test_a_decode_server_that_was_stopped_learns_that_its_rooms_are_gone() -> None:
    """Whatever has ended them. It asks for them again, and is not left to wait for a request to come."""
    for steps, act in (
        (1, lambda world: None),  # computing
        (8, lambda world: None),  # held
        (8, lambda world: world.abort("prefill", 0)),
        (2, lambda world: world.abort("prefill", 0)),
    ):
        world = World()
        world.post(20)
        for _ in range(steps):
            world.work()
        act(world)
        late(world)
        for _ in range(3):
            world.work()
        assert len(ends(world, "decode")) == 1, (steps, "it still waits")
        assert ends(world, "decode")[0] in ("decode_lost", "lease_ended", "prefill_failed", "prefill_dropped")
        assert not world.prefill.made.stats()["rooms_wanted_before_they_came"]
        world.settle()
        world.check_settled()


def test_rooms_are_counted_by_their_states() -> None:
    """By the names that SGLang uses; what is over is counted as such."""
    world, seen = World(), []
    world.post(20)
    for _ in range(12):
        world.work()
        told = [server.made.stats() for server in (world.prefill, world.decode)]
        assert all(sum(one[f"rooms_{state}"] for state in STATES) == one["rooms"] for one in told)
        seen += [state for state in STATES for one in told if one[f"rooms_{state}"]]
    assert {*seen} == {*STATES}
    run(world)
    assert world.prefill.made.stats()["rooms_taken_total"] == world.decode.made.stats()["rooms_arrived_total"] == 1


def test_a_lost_connection_costs_nothing() -> None:
    """What was missed is told again, and nothing is read twice."""
    world = World()
    world.post(20)
    for turn in range(30):
        world.work()
        if turn % 4 == 3:
            world.lose(turn // 2)
            world.wait(1.0)
        world.end_read(0, True)
    assert ends(world, "decode") == ["length"]
    assert world.decode.made.stats()["bytes_read_total"] == 20 * 12
    world.check_settled()


def test_what_is_cached_is_not_read() -> None:
    world = World()
    world.decode.cached = 15
    world.post(20)
    run(world)
    assert ends(world, "decode") == ["length"]
    assert world.decode.made.stats()["bytes_read_total"] == 5 * 12


def test_prefill_holds_no_more_than_its_share() -> None:
    """Decode is away: what it does not take leaves room for others, and comes to an end."""
    world = World(Setup(share=0.5))
    for _ in range(6):
        world.post(20, "prefill")
    held = []
    for _ in range(200):
        world.work()
        world.wait(0.5)
        held.append(20 - len(world.prefill.free))
    assert 0 < max(held) <= 11
    assert len(ends(world, "prefill")) == 6
    world.check_settled()


# ---- shares of keys --------------------------------------------------------------------------------------------------


def pairs(world: World, principal: str) -> list[str]:
    """Return how one pair of a key ends on decode, in six seconds."""
    before = len(ends(world, "decode"))
    world.post(8, principal=principal, room=1000 + before)
    run(world, 60)
    return ends(world, "decode")[before:]


def test_rooms_that_never_come_leave_some_to_other_keys() -> None:
    """One key asks on decode for more rooms than prefill takes from one server, and sends none of them there."""
    world = World(Setup(max_rooms=8))
    for _ in range(4):
        world.post(5, "decode", principal="alice")
    run(world)
    assert not ends(world, "decode"), "a key that is alone has all that a server may have"
    for _ in range(2):
        world.post(5, "decode", principal="alice")
    run(world)
    assert ends(world, "decode") == ["too_many_rooms"] * 2
    world.post(8, "decode", room=50, seed=9, principal="bob")
    run(world)
    assert ends(world, "decode") == ["too_many_rooms"] * 3, "the youngest of the key that has most"
    world.post(8, "prefill", room=50, seed=9, principal="bob")
    run(world)
    assert world.answers["decode"]["decode-50-9"] == "length"
    world.settle()
    world.check_settled()


def test_requests_that_wait_for_their_kv_leave_places_to_other_keys() -> None:
    gate = DisaggGate(
        DisaggOptions(role="decode", max_rooms=4),
        World().decode.made.ctx,
        World().decode.end,
    )

    def enter(room: int, principal: str) -> tuple[Req, str]:
        req = gated_request({"disagg": {**SAID, "bootstrap_room": room}}, principal=principal)
        return req, gate.enter(req).code

    alice = [enter(room, "alice") for room in range(5)]
    assert [code for _, code in alice] == ["", "", "", "", "too_many_rooms"]
    bob = [enter(room, "bob") for room in range(10, 13)]
    assert [code for _, code in bob] == ["", "", "too_many_rooms"]
    news = gate.poll([req for req, _ in (*alice, *bob)])
    assert {rid: verdict.code for rid, verdict in news.items() if isinstance(verdict, Verdict)} == {
        alice[number][0].rid: "too_many_rooms" for number in (2, 3)
    }


def test_kv_that_no_server_asks_for_gives_way_to_other_keys() -> None:
    """One key has prefill compute more than may be held, and no decode server wants any of it."""
    world = World(Setup(share=0.5))
    for _ in range(8):
        world.post(19, "prefill", principal="alice")
    run(world, 10)
    assert world.prefill.made.stats()["rooms_held"] == 2
    assert pairs(world, "bob") == ["length"]
    for _ in range(3):
        assert pairs(world, "bob") == ["length"], "its next requests wait no longer"
    world.settle()
    world.check_settled()


def test_kv_of_one_key_waits_as_long_as_it_may() -> None:
    world = World(Setup(share=0.5))
    for _ in range(4):
        world.post(19, "prefill", principal="alice")
    run(world, 250)
    assert world.prefill.made.stats()["rooms_held"] == 2
    world.settle()
    assert "rooms_given_way_total" not in world.prefill.made.stats()
    world.check_settled()


def test_keys_take_turns() -> None:
    """Where decode takes what is computed, the key with fewer tokens is next, and of one key the first that came."""
    held, rooms = Held(10), {}
    for number, key in enumerate("aaaabab"):
        rooms[f"{number}"] = PrefillRoom(RoomKey(number), f"{number}", 5, number, key)
    order = []
    for room in rooms.values():
        held.wait(room)
    while (first := held.next(rooms)) is not None:
        order.append(first.rid)
        held.open(first)
    assert order == ["0", "4", "1", "6", "2", "3", "5"]


def test_without_a_pool() -> None:
    assert "no KV pool" in str(DisaggGate.supports(DisaggOptions(), AdmissionGateContext()))
