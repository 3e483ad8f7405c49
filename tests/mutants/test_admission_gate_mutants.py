"""Broken gates, and the tests of the suite that notice."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pegboard.conformance.admission_gate import AdmissionGateContract, gated_request
from pegboard.conformance.collecting import InMemory
from pegboard.conformance.fakes import registry_of
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.outcomes import Outcomes
from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, GateOptions, Verdict
from pegboard.core.interfaces.plugin import BodyField, Provider
from pegboard.core.interfaces.req import Req
from pegboard.core.registry.registry import Registry
from pegboard.plugins.kv_handoff.api import HandoffGate, KVVerdict
from pegboard.plugins.kv_handoff.suite.gate import HandoffGateContract
from pegboard_drills.gate import DrillGate
from pegboard_drills.options import DrillGateOptions


class GateSuite(HandoffGateContract):
    """The suite as an author of such a gate would have it."""

    def blocked_request(self, gate: AdmissionGate) -> Req:
        return gated_request({"drill": {"act": "delay", "delay": 0.5}})

    def held_request(self, gate: AdmissionGate) -> Req:
        return gated_request({"drill": {"hold": 0.5}})

    def reserving_request(self, gate: HandoffGate) -> Req:
        return gated_request({"drill": {"act": "bring", "token": 9, "linger": 0.5}})

    def followed_request(self, gate: HandoffGate) -> Req:
        return gated_request({"drill": {"hold": 0.5}})


class ConcernsEverybody(DrillGate):
    def concerns(self, req):
        return True


class ConcernsNobody(DrillGate):
    def concerns(self, req):
        return False


class TrustsTheRequest(DrillGate):
    def judge(self, req):
        return super().judge(req) if req.params["drill"].get("act") else OPEN


class BlamesItself(DrillGate):
    def judge(self, req):
        verdict = super().judge(req)
        return replace(verdict, status=500) if verdict.status else verdict


class KeepsWhatItRefused(DrillGate):
    def judge(self, req):
        verdict = super().judge(req)
        self._until[req.rid] = 0.0
        return verdict


class SaysNothing(DrillGate):
    def judge(self, req):
        return replace(super().judge(req), reason=" ")


class CountsInPercent(DrillGate):
    def judge(self, req):
        return replace(super().judge(req), progress=20.0)


class OpensTooEarly(DrillGate):
    def news(self, blocked):
        return dict.fromkeys([req.rid for req in blocked], OPEN)


class NeverOpens(DrillGate):
    def news(self, blocked):
        return {}


class FailsInTheEnd(DrillGate):
    def news(self, blocked):
        found = super().news(blocked)
        return {rid: Verdict.failed("no") if one is OPEN else one for rid, one in found.items()}


class TellsOfEverybody(DrillGate):
    def news(self, blocked):
        return {rid: self._verdict(rid) for rid in self._since}


class ForgetsToCancel(DrillGate):
    def forget(self, req):
        pass


class CancelsOnce(DrillGate):
    def forget(self, req):
        del self._since[req.rid]


class CancelsEverybody(DrillGate):
    def forget(self, req):
        self._since.clear()

    def news(self, blocked):
        return {req.rid: self._verdict(req.rid) for req in blocked if req.rid in self._since}


class RemembersNames(DrillGate):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._known = []

    def judge(self, req):
        if hash(req.rid) in self._known:
            return Verdict.failed("this name was here before")
        self._known.append(hash(req.rid))
        return super().judge(req)


class WritesToTheRequest(DrillGate):
    def judge(self, req):
        req.blocked_by = "me"
        return super().judge(req)


class NamesTheNamespaceItself(DrillGate):
    def judge(self, req):
        req.namespace = "red"
        return super().judge(req)


class GivesASeed(DrillGate):
    def judge(self, req):
        req.seed = 7
        return super().judge(req)


class CutsTokensItself(DrillGate):
    def news(self, blocked):
        for req in blocked:
            req.sampling = structs.replace(req.sampling, max_new_tokens=1)
        return super().news(blocked)


class AsksInAnothersName(DrillGate):
    def finished(self, req):
        req.principal = "another"
        return super().finished(req)


class WritesIntoTheParameters(DrillGate):
    def judge(self, req):
        verdict = super().judge(req)
        req.params["drill"]["seen"] = True
        return verdict


class Napping(DrillGate):
    def judge(self, req):
        sleep(0.001)
        return super().judge(req)


class AsksTheNetwork(DrillGate):
    def concerns(self, req):
        with contextlib.suppress(Exception):
            socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()
        return super().concerns(req)


class WaitsForItsThread(DrillGate):
    """The work is in a thread, and the scheduler waits for it all the same."""

    def news(self, blocked):
        done = threading.Event()
        threading.Timer(0.02, done.set).start()
        done.wait(1.0)
        return super().news(blocked)


class WaitsForAnAnswer(DrillGate):
    def news(self, blocked):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().news, blocked).result()
        return super().news(blocked)


class TrustsItsFields(DrillGate):
    def judge(self, req):
        said = req.params["drill"]
        float(said.get("delay", 0.0) if isinstance(said, dict) else 0.0)
        return super().judge(req)


class Ticket:
    """Prints nothing of what it has."""

    def __init__(self, req):
        self.req = req

    def __repr__(self):
        return "a ticket"


class KeepsTickets(DrillGate):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._tickets = []

    def judge(self, req):
        self._tickets.append(Ticket(req))
        return super().judge(req)


class KeepsCallbacks(DrillGate):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._then = []

    def judge(self, req):
        self._then.append(lambda: req.priority)
        return super().judge(req)


SEEN = {}  # type: ignore[var-annotated]


class KeepsThemInItsModule(DrillGate):
    def judge(self, req):
        SEEN[f"request/{req.rid}"] = True
        return super().judge(req)


class LooksUnderAnotherName(DrillGate):
    """Never hears of what the test class says."""

    def concerns(self, req):
        return "exercise" in req.params


class RemembersTheFinished(DrillGate):
    def finished(self, req):
        held = super().finished(req)
        self._since[req.rid] = (0.0, self.options)
        return held


class NeverReleases(DrillGate):
    def released(self):
        return []


class ReleasesAtOnce(DrillGate):
    def released(self):
        free, self._until = list(self._until), {}
        return free


class ReleasesForEver(DrillGate):
    def released(self):
        return [rid for rid, until in self._until.items() if self.ctx.clock() >= until]


class ForgetsToDrop(DrillGate):
    def drop(self, req):
        pass


class HoldsWithoutSayingSo(DrillGate):
    def finished(self, req):
        super().finished(req)
        return True


class TellsNames(DrillGate):
    def stats(self):
        return {f"memory of {rid}": 1.0 for rid in self._since}


def without(verdict: Verdict) -> Verdict:
    """The same verdict, with nothing that has arrived."""
    return replace(verdict, arrived=None) if isinstance(verdict, KVVerdict) else verdict


class LosesWhatItBrought(DrillGate):
    def news(self, blocked):
        return {rid: without(verdict) for rid, verdict in super().news(blocked).items()}


class BringsTooMuch(DrillGate):
    """The token's KV, too, which is not there."""

    def news(self, blocked):
        verdicts = dict(super().news(blocked))
        for rid, verdict in verdicts.items():
            if isinstance(verdict, KVVerdict) and verdict.arrived is not None:
                arrived = replace(verdict.arrived, length=verdict.arrived.length + 1)
                verdicts[rid] = replace(verdict, arrived=arrived)
        return verdicts


class ReleasesMemoryAtOnce(DrillGate):
    def released(self):
        free = [*super().released(), *self._until]
        self._until.clear()
        self._reservations.clear()
        return free


class KeepsReservations(DrillGate):
    def released(self):
        gone = dict(self._reservations)
        free = super().released()
        self._reservations |= {rid: memory for rid, memory in gone.items() if rid in free}
        return free


class FearsForMemoryItNeverHad(DrillGate):
    def forget(self, req):
        super().forget(req)
        return True


class Plain(DrillGate):
    """As a gate is that brings nothing and follows nothing."""

    reserved = HandoffGate.reserved
    computed = HandoffGate.computed
    follows = HandoffGate.follows


class AsksForMemoryInSecret(Plain):
    """Of the core, which was not told that it does."""

    def judge(self, req):
        return KVVerdict.asking(super().judge(req).reason)


class TakesMemoryInSecret(Plain):
    reserved = DrillGate.reserved


class FollowsInSecret(Plain):
    computed = DrillGate.computed


class FollowsEverything(DrillGate):
    def follows(self, req):
        return True


class KeepsWhatItFollows(DrillGate):
    """From before the request has come to the gate."""

    def follows(self, req):
        self.places[req.rid] = np.empty(0, np.int32)
        return super().follows(req)


class MindsRetractions(DrillGate):
    def computed(self, req, slots):
        assert slots.max() > 0
        super().computed(req, slots)


class KeepsEachDelay(DrillGate):
    """Counts who waits for how long, and leaves zeros behind."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.waiting = {}

    def judge(self, req):
        said = req.params.get("drill")
        act = said.get("act") if isinstance(said, dict) else None
        if isinstance(act, str):
            self.waiting[act] = 0
        return super().judge(req)


KNOWN: dict[str, Any] = {}


class SharesItsRequests(DrillGate):
    """Between all gates of a process."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._since = KNOWN


class AsksTheMachine(DrillGate):
    def _verdict(self, rid):
        self.asked = time.monotonic()
        return super()._verdict(rid)


class AddsADefault(DrillGate):
    def judge(self, req):
        if isinstance(req.params.get("drill"), dict):
            req.params["drill"].setdefault("delay", 0.5)
            req.params["drill"]["most"] = None
        return super().judge(req)


class DividesByItsRequests(DrillGate):
    def stats(self):
        return {"mean": 1.0 / len(self._since)}


class LeavesItsThread(DrillGate):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        threading.Thread(target=threading.Event().wait, args=(9.0,), name="refill", daemon=True).start()


class AnswersNothing(DrillGate):
    def finished(self, req):
        super().finished(req)


class AnswersRequests(DrillGate):
    """Where rids belong."""

    def news(self, blocked):
        return {req: self._verdict(req.rid) for req in blocked}


class Tenants(AdmissionGate[GateOptions]):
    """Lets one request of a tenant run at a time."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.running = {}
        self.tenant = {}

    def concerns(self, req):
        return "tenants" in req.params

    def enter(self, req):
        said = req.params["tenants"]
        name = said.get("tenant") if isinstance(said, dict) else None
        if not isinstance(name, str):
            return Verdict.failed("tenant must be a text")
        if (self.running.get(name) or req.rid) != req.rid:
            return Verdict.blocked(f"another request of {name}")
        self.running[name] = req.rid
        self.tenant[req.rid] = name
        return OPEN

    def poll(self, blocked):
        return {req.rid: self.enter(req) for req in blocked}

    def finished(self, req):
        self.cancel(req)
        return False

    def cancel(self, req):
        if req.rid in self.tenant:
            del self.running[self.tenant.pop(req.rid)]


def tenants(*body: BodyField) -> Registry:
    return registry_of(Provider("admission_gate", "tenants", f"{__name__}:Tenants", "tenants", body=body))


class TenantSuite(AdmissionGateContract):
    provider = "tenants"
    registry = tenants(BodyField("tenant", str))

    def blocked_request(self, gate: AdmissionGate) -> Req:
        self.first = gated_request({"tenants": {"tenant": "a"}})
        gate.enter(self.first)
        return gated_request({"tenants": {"tenant": "a"}})

    def clear(self, gate: AdmissionGate, clock: object, req: Req) -> None:
        assert isinstance(gate, Tenants)
        for rid in set(gate.tenant) - {req.rid}:
            gate.finished(gated_request(rid=rid))


class QueuesTenants(Tenants):
    """Has those that wait in a queue, of which a request that is cancelled is taken to be the first."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.queue = []

    def poll(self, blocked):
        return {req.rid: self.enter(req) for req in blocked if req.rid in self.queue[:1]}

    def enter(self, req):
        verdict = super().enter(req)
        if verdict.reason.startswith("another") and req.rid not in self.queue:
            self.queue.append(req.rid)
        elif verdict is OPEN and req.rid in self.queue:
            self.queue.remove(req.rid)
        return verdict

    def cancel(self, req):
        super().cancel(req)
        if req.rid in self.queue:
            self.queue.remove(req.rid)


class CancelsTheFirst(QueuesTenants):
    def cancel(self, req):
        Tenants.cancel(self, req)
        del self.queue[:1]


class KeepsEmptyTenants(Tenants):
    def cancel(self, req):
        if req.rid in self.tenant:
            self.running[self.tenant.pop(req.rid)] = None


class AnotherType(TenantSuite):
    registry = tenants(BodyField("tenant", int))


class AnotherName(TenantSuite):
    registry = tenants(BodyField("tennant", str))


class NeverClears(TenantSuite):
    def clear(self, gate: AdmissionGate, clock: object, req: Req) -> None:
        pass


class KeepsPlaces(DrillGate):
    def drop(self, req):
        self._until.pop(req.rid, None)


QUIET = ("-p", "no:faulthandler", "-p", "no:threadexception", "-p", "no:unraisableexception", "-p", "no:timeout")
HOLDS = frozenset({"holds"})
BRINGS = frozenset({"brings_kv"})


def mutant(factory: type, caught_by: str, provides: frozenset[str] = HOLDS, says: str = "") -> Mutant:
    return Mutant(factory, GateSuite, caught_by, provides=provides, options_model=DrillGateOptions, says=says)


MUTANTS = [
    mutant(AnswersNothing, "test_nobody_is_held", frozenset(), "finished() answers None"),
    mutant(AnswersRequests, "test_news_is_of_those_asked_about", HOLDS, "its keys are rids"),
    mutant(AsksTheMachine, "test_time_is_that_of_the_context", HOLDS, "the gate asks time.monotonic"),
    mutant(AddsADefault, "test_requests_are_read_and_not_changed", HOLDS, "has changed what the request says"),
    mutant(DividesByItsRequests, "test_it_tells_of_itself_in_numbers", HOLDS, "raises ZeroDivisionError, before any"),
    mutant(LeavesItsThread, "test_close_lets_threads_go", HOLDS, "leaves threads running: refill"),
    Mutant(CancelsTheFirst, TenantSuite, "test_another_that_says_the_same_may_be_cancelled", says="the one before"),
    mutant(SharesItsRequests, "test_gates_know_nothing_of_each_other", HOLDS, "keep state in self"),
    mutant(KeepsEachDelay, "test_what_requests_said_is_forgotten", HOLDS, "(self.waiting)"),
    Mutant(KeepsEmptyTenants, TenantSuite, "test_what_requests_said_is_forgotten", says="(self.running)"),
    mutant(TellsNames, "test_it_tells_of_itself_in_numbers"),
    mutant(LosesWhatItBrought, "test_what_was_brought_arrives", BRINGS),
    mutant(BringsTooMuch, "test_what_was_brought_arrives", BRINGS),
    mutant(ReleasesMemoryAtOnce, "test_memory_that_is_given_back_is_forgotten", BRINGS),
    mutant(KeepsReservations, "test_memory_that_is_given_back_is_forgotten", BRINGS),
    mutant(FearsForMemoryItNeverHad, "test_a_request_may_end_before_it_has_memory", BRINGS),
    mutant(AsksForMemoryInSecret, "test_no_memory_is_asked_for"),
    mutant(TakesMemoryInSecret, "test_no_memory_is_asked_for"),
    mutant(MindsRetractions, "test_what_is_computed_is_followed", HOLDS),
    mutant(KeepsPlaces, "test_what_is_computed_is_followed", HOLDS),
    mutant(FollowsInSecret, "test_a_gate_that_follows_nothing_is_told_nothing"),
    mutant(FollowsEverything, "test_what_does_not_concern_it_is_not_followed"),
    mutant(KeepsWhatItFollows, "test_what_does_not_concern_it_is_not_followed"),
    mutant(ConcernsEverybody, "test_a_request_that_asks_for_nothing_does_not_concern_it"),
    mutant(ConcernsNobody, "test_blocked_until_the_way_is_clear"),
    mutant(TrustsTheRequest, "test_nonsense_is_taken_or_refused"),
    mutant(BlamesItself, "test_nonsense_is_taken_or_refused"),
    mutant(KeepsWhatItRefused, "test_nonsense_is_taken_or_refused"),
    mutant(SaysNothing, "test_a_blocked_request_is_told_why"),
    mutant(CountsInPercent, "test_a_blocked_request_is_told_why"),
    mutant(OpensTooEarly, "test_blocked_until_the_way_is_clear"),
    mutant(NeverOpens, "test_blocked_until_the_way_is_clear", HOLDS, "poll() says nothing of it. After clear()"),
    mutant(FailsInTheEnd, "test_blocked_until_the_way_is_clear"),
    mutant(TellsOfEverybody, "test_news_is_of_those_asked_about", HOLDS, "and tells of ["),
    mutant(ForgetsToCancel, "test_a_cancelled_request_is_forgotten"),
    mutant(CancelsOnce, "test_a_cancelled_request_is_forgotten"),
    mutant(CancelsEverybody, "test_a_cancelled_request_leaves_others_alone"),
    mutant(RemembersNames, "test_a_name_may_come_again"),
    mutant(WritesToTheRequest, "test_requests_are_read_and_not_changed"),
    mutant(NamesTheNamespaceItself, "test_requests_are_read_and_not_changed"),
    mutant(GivesASeed, "test_requests_are_read_and_not_changed"),
    mutant(CutsTokensItself, "test_requests_are_read_and_not_changed"),
    mutant(AsksInAnothersName, "test_requests_are_read_and_not_changed"),
    mutant(WritesIntoTheParameters, "test_requests_are_read_and_not_changed"),
    mutant(TrustsItsFields, "test_nonsense_in_a_field_is_taken_or_refused"),
    mutant(LooksUnderAnotherName, "test_nonsense_is_taken_or_refused"),
    mutant(Napping, "test_coming_in_never_blocks"),
    mutant(AsksTheNetwork, "test_coming_in_never_blocks"),
    mutant(Napping, "test_waiting_never_blocks"),
    mutant(WaitsForItsThread, "test_waiting_never_blocks"),
    mutant(WaitsForAnAnswer, "test_waiting_never_blocks"),
    mutant(KeepsTickets, "test_a_cancelled_request_is_forgotten"),
    mutant(KeepsCallbacks, "test_a_finished_request_is_forgotten"),
    mutant(KeepsThemInItsModule, "test_a_finished_request_is_forgotten"),
    mutant(RemembersTheFinished, "test_a_finished_request_is_forgotten"),
    mutant(NeverReleases, "test_a_held_request_is_released_once"),
    mutant(ReleasesAtOnce, "test_a_held_request_is_released_once"),
    mutant(ReleasesForEver, "test_a_held_request_is_released_once"),
    mutant(ForgetsToDrop, "test_a_held_request_that_is_dropped_is_forgotten"),
    mutant(HoldsWithoutSayingSo, "test_nobody_is_held", frozenset(), "declare the capability `holds`"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@pytest.mark.full
@pytest.mark.parametrize(
    ("suite", "words"),
    [
        (AnotherType, "BodyField('tenant', int), but blocked_request() says params['tenants']['tenant'] = 'a'"),
        (AnotherName, "the record declares the field 'tennant'"),
        (TenantSuite, ""),
    ],
)
def test_fields_of_bodies_are_those_that_are_read(suite: type[AdmissionGateContract], words: str) -> None:
    outcomes, output = outcomes_of(suite, "declared_fields")
    assert bool(outcomes.failed) is bool(words), output
    assert words in " ".join(output.split())


@pytest.mark.full
def test_a_class_that_does_not_clear_the_way_is_told() -> None:
    outcomes, output = outcomes_of(NeverClears, "until_the_way_is_clear")
    assert outcomes.failed
    assert "poll() says BLOCKED (another request of a). After clear() of the test class nothing may be left" in output


def outcomes_of(suite: type[AdmissionGateContract], words: str) -> tuple[Outcomes, str]:
    outcomes, output = Outcomes(), io.StringIO()
    with contextlib.redirect_stdout(output):
        runner = InMemory("admission_gate", lambda: {suite.__name__: suite})
        runner.run("--capture=no", *QUIET, "-k", words, plugins=[outcomes])
    return outcomes, output.getvalue()
