"""Namespaces that gates give: composed in one form, and KV is shared within one only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from pegboard.conformance.admission_gate import ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import (
    OPEN,
    AdmissionGate,
    AdmissionGateContext,
    GateOptions,
    GateState,
    Verdict,
)
from pegboard.core.interfaces.req import Req, TokenPositions
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.step import AnySource, CoreServices
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.pipeline.guarded_gate import composed, move
from pegboard.plugins.media.api import PieceKey
from pegboard.plugins.media.work import KEPT, ReqMedia, media_of
from tests.core.pipeline.harness import IGNORE, Harness, oracle

PROMPT = list(range(20, 40))
NOTHING: Any = None


class Naming(AdmissionGate):
    """Says of a request what its parameter `naming` says: its namespace as it enters, or after a while."""

    def __init__(self, key: str = "naming") -> None:
        super().__init__(GateOptions(), AdmissionGateContext(ManualClock()))
        self.key = key

    def concerns(self, req: Req) -> bool:
        return self.key in req.params

    def enter(self, req: Req) -> Verdict:
        said = req.params[self.key]
        return Verdict.blocked("loads") if "late" in said else Verdict(GateState.OPEN, namespace=said["name"])

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        return {req.rid: Verdict(GateState.OPEN, namespace=req.params[self.key]["name"]) for req in blocked}


class Core(Stage):
    """Has the services of the core."""

    name = "core"
    services: CoreServices

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        self.services = core
        return ()


class Reserving(Naming):
    """Reserves memory and brings nothing in the end; meanwhile, and then, it says what namespace it is told to say."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.core = Core()

    def enter(self, req: Req) -> Verdict:
        return Verdict(GateState.BLOCKED, "brings KV", namespace=req.params[self.key]["first"])

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        for req in blocked:
            assert self.core.services.reserve(req)
        return {req.rid: Verdict(GateState.OPEN, namespace=req.params[self.key]["then"]) for req in blocked}

    def passed(self, req: Req) -> bool:
        self.core.services.give_back(req)
        return False


def harness_of(*gates: tuple[str, AdmissionGate], **more: Any) -> Harness:
    keeper = GateKeeper(gates, ManualClock())
    return Harness(parts={"gates": keeper}, **more)


def test_namespaces_are_equal_only_where_all_parts_are() -> None:
    """Whatever a gate or a client says that looks like the form itself."""
    odd = ("", "x", "a=1:x/", "1:x/", "x/b=1:x", "salt:x", "/", "x/salt:x")
    owns = ("", "salt:x", "salt:a=1:x/", "salt:x/salt:x")
    found: dict[str, object] = {}
    for a, b, own in itertools.product(odd, odd, owns):
        parts = {name: part for name, part in (("b", b), ("a", a)) if part}
        assert found.setdefault(composed(parts, own), (a, b, own)) == (a, b, own)
    assert composed({"tenant": "red", "lora": "x"}, "salt:s") == "lora=1:x/tenant=3:red/salt:s"
    assert composed({}, "salt:s") == "salt:s", "without gates it is what it was"


@pytest.mark.parametrize("late", [False, True])
def test_kv_is_shared_within_a_namespace_only(late: bool) -> None:
    harness = harness_of(("naming", Naming()), ("other", Naming("other")))
    seen: set[object] = set()
    for number, (name, other, own) in enumerate(itertools.product(("red", "blue", ""), ("red", ""), ("", "salt:s"))):
        params: dict[str, Any] = {"naming": {"name": name, **({"late": 1} if late else {})}, "other": {"name": other}}
        for again in (False, True):
            rid = f"r{number}{again}"
            harness.submit(rid, PROMPT, 4, params=params, namespace=own, **IGNORE)
            harness.run()
            assert harness.tokens(rid) == oracle(PROMPT, 4, ignore_eos=True)
            cached = harness.outputs[rid][-1].cached_tokens
            assert (cached > 0) is again, f"{(name, other, own)}: {cached} tokens were cached"
        seen.add((name, other, own))
    assert len(seen) == 12


def test_a_request_that_moves_takes_its_media_and_starts_a_new_memo() -> None:
    pieces = (PieceKey("salt:s", b"1", 0), PieceKey("salt:s", b"1", 1))
    media = ReqMedia((), (), pieces, TokenPositions(NOTHING, 0), NOTHING, NOTHING, NOTHING)
    req = gated_request(namespace="salt:s")
    KEPT.of(req).media, memo = media, req.memo
    move(req, "salt:s")
    assert req.memo is memo
    assert media_of(req) is media
    move(req, "a=1:x/salt:s")
    assert req.namespace == "a=1:x/salt:s"
    assert req.memo is not memo
    moved = media_of(req)
    assert moved is not None
    assert moved.pieces == (PieceKey("a=1:x/salt:s", b"1", 0), PieceKey("a=1:x/salt:s", b"1", 1))
    assert media.pieces == pieces, "other answers to the prompt share it"


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_no_namespace_changes_once_there_is_memory(loop: str) -> None:
    """What is cached of it was found in the namespace that the request had then."""
    gate = Reserving("reserving")
    harness = harness_of(("reserving", gate), ("naming", Naming()), loop=loop, joining=[gate.core])
    ways = {
        "stays": ({"first": "x", "then": "x"}, None),
        "silent": ({"first": "x", "then": None}, None),
        "changes": ({"first": "x", "then": "y"}, "has memory"),
        "later": ({"first": "x", "then": "x"}, "has memory"),
    }
    for rid, (said, _) in ways.items():
        params = {"reserving": said, **({"naming": {"name": "z"}} if rid == "later" else {})}
        harness.submit(rid, PROMPT, 4, params=params, **IGNORE)
        harness.run(limit=50)
    for rid, (_, problem) in ways.items():
        end = harness.finish(rid)
        if problem is None:
            assert harness.tokens(rid) == oracle(PROMPT, 4, ignore_eos=True)
        else:
            assert (end["status"], end["code"]) == (500, "gate_failed")
            assert problem in end["message"]
    assert harness.outputs["silent"][-1].cached_tokens > 0


@pytest.mark.parametrize("wrong", [3, b"x", "x" * 1025])
def test_what_is_not_a_namespace_fails_its_request(wrong: Any) -> None:
    keeper = GateKeeper([("naming", Naming())], ManualClock())
    failure = keeper.arrive(gated_request({"naming": {"name": wrong}}))
    assert failure is not None
    assert (failure.status, failure.code) == (500, "gate_failed")
    assert "namespace" in failure.reason


def test_a_verdict_without_a_namespace_changes_none() -> None:
    keeper = GateKeeper([("naming", Naming()), ("other", Naming("other"))], ManualClock())
    req = gated_request({"naming": {"name": "red"}, "other": {"name": None}}, namespace="salt:s")
    assert keeper.arrive(req) is None
    assert req.namespace == "naming=3:red/salt:s"
    assert OPEN.namespace is None


def test_a_stage_changes_what_its_gate_adds() -> None:
    """Of a request without memory, with a new memo; not of one with memory."""
    core = Core()
    harness = harness_of(("naming", Naming()), ("other", Naming("other")), joining=[core])
    params = {"naming": {"name": "red"}, "other": {"name": "blue"}}
    for rid in ("a", "b"):
        harness.submit(rid, PROMPT, 4, params=params, namespace="salt:s", **IGNORE)
    harness.submit("plain", PROMPT, 4, **IGNORE)
    waiting = {req.rid: req for req in harness.scheduler.waiting}
    memo = waiting["b"].memo
    core.services.rename(waiting["b"], "naming", "green")
    core.services.rename(waiting["plain"], "naming", "green")
    assert waiting["b"].namespace == "naming=5:green/other=4:blue/salt:s"
    assert waiting["b"].memo is not memo
    assert waiting["a"].namespace == "naming=3:red/other=4:blue/salt:s"
    assert waiting["plain"].namespace == "", "no gate is concerned with it"
    harness.step()
    for rid in ("a", "b"):
        with pytest.raises(TypeError, match="has memory"):
            core.services.rename(waiting[rid], "naming", "white")
        core.services.rename(waiting[rid], "naming", {"a": "red", "b": "green"}[rid])
    harness.run()
    assert [harness.outputs[rid][-1].cached_tokens for rid in ("a", "b")] == [0, 0]
    for rid, name in (("c", "green"), ("d", "white")):
        harness.submit(rid, PROMPT, 4, params={**params, "naming": {"name": name}}, namespace="salt:s", **IGNORE)
        harness.run()
        assert (harness.outputs[rid][-1].cached_tokens > 0) is (name == "green")
