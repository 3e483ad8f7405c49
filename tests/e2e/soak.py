"""A soak of the scheduler: thousands of requests with every kind of end, in a pool that is far too small for them.

Everything around the scheduler misbehaves now and then, from a generator with a seed: clients abort, forward passes
fail (for nobody's fault, or for that of one request), hooks, the policy and the cache raise. The fake model's answers
depend on every slot of a request's row (see `tests.core.pipeline.harness`), so whatever goes wrong shows in a token.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pegboard.core.frontend.intake import pack_ids
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    TokenizedBatch,
    TokenizedRequest,
    ToScheduler,
)
from pegboard.core.interfaces.req import NO_ROW, Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.registry.registry import Registry
from tests.core.pipeline.harness import EOS, VOCAB, FakeModel, Harness, next_token

DOOMED = VOCAB - 1
"""First token of a prompt that no forward pass survives."""
LATE = VOCAB - 2
"""First token of a request whose forward passes fail from the length on that its second token says."""

POOL = 208
LONGEST = 100
MOST_NEW = 30
FAULTY = 0.01
"""How often a hook, the policy or the cache raises, per call."""
TICK = 0.01
"""Seconds that a step takes, by the scheduler's clock."""
PATIENCE = 1.0
"""How long the drill gate lets a request wait."""
CLIENT, SERVER = 499, 500
GATE = {"fail": 422, "never": 504, "raise": 500}
"""Statuses of requests that never get through the drill gate."""


@dataclass(slots=True)
class Sent:
    """A request, and what it is answered where nothing interferes."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    answer: list[int]
    doomed: bool
    asks: dict[str, Any]
    """What it says to the gates."""
    aborted: bool = False
    """Whether somebody asked for its end before it was there."""


class SoakModel(FakeModel):
    """Fails at times, and notes what it was asked for and should not have been."""

    rng: random.Random
    chance: float
    hiccups: int
    """Passes that failed for nobody's fault."""
    alone: int
    """Those with a single request in them, which is blamed."""
    bugs: list[str]

    def start(self, rng: random.Random, chance: float) -> None:
        self.rng, self.chance, self.hiccups, self.alone, self.bugs = rng, chance, 0, 0, []
        self._seen, self._broken = 0, False
        self.fail_on = self._fails

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        self.batches.clear()
        behind_failed, self._broken = self._broken, False
        first_time = work.bid > self._seen
        try:
            return super().__call__(work)
        except AssertionError as error:
            # A step that was launched behind one that failed reads what that one was to write; its result is thrown
            # away. Anything else is a bug, which must not pass for a failed forward pass.
            if not (behind_failed and first_time):
                self.bugs.append(f"batch {work.bid}: {error}")
            raise
        except RuntimeError:
            self._broken = first_time
            raise
        finally:
            self._seen = max(self._seen, work.bid)

    def _fails(self, work: ModelWorkerBatch) -> bool:
        if work.bid > self._seen and self.rng.random() < self.chance:
            self.hiccups += 1
            self.alone += len(work.rows) == 1
            return True
        return any(self._to_blame(work, index) for index in range(len(work.rows)))

    def _to_blame(self, work: ModelWorkerBatch, index: int) -> bool:
        first = self._prompt_token(work, index, 0)
        if first == LATE:
            return int(work.seq_lens[index]) >= self._prompt_token(work, index, 1)
        return first == DOOMED

    def _prompt_token(self, work: ModelWorkerBatch, index: int, position: int) -> int:
        """From the batch itself where it computes that position, otherwise from the slot."""
        start = int(work.extend_lens[:index].sum())
        prefix, end = int(work.prefix_lens[index]), int(work.seq_lens[index])
        if position >= end:
            return 0
        if position >= prefix:
            return int(work.input_ids[start + position - prefix])
        return int(self.slots[self.table[work.rows[index], position]])


@dataclass
class Soak:
    """Drives one scheduler. `arrangement` goes to the harness."""

    seed: int
    arrangement: dict[str, Any]
    hiccups: float = 0.01
    aborts: float = 0.05
    """Chance of an abort, per step."""
    sent: dict[str, Sent] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)
    aborted_in: Counter[str] = field(default_factory=Counter)
    """Aborts by where their requests were."""
    finished: Counter[str] = field(default_factory=Counter)
    """How often hooks were told of a request's end."""
    raised: Counter[str] = field(default_factory=Counter)
    idles: int = 0
    told_idle: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._numbers = itertools.count()
        self._settled = 0
        # Faults draw from generators of their own: with the overlap loop, forward passes run beside everything else.
        self.faults = random.Random(self.seed + 1)
        hooks = StepHooks(
            batch_scheduled=(self._flaky("batch_scheduled", lambda batch: None),),
            batch_committed=(self._flaky("batch_committed", lambda batch: None),),
            requests_finished=(self._flaky("requests_finished", self._note_finished),),
            idle=(self._flaky("idle", self._note_idle),),
        )
        self.now = 0.0
        gates = GateKeeper([self._gate("session"), self._gate("drill", timeout=PATIENCE)], self._clock)
        self.harness = Harness(
            tokens=POOL,
            hooks=hooks,
            estimate_max_new_tokens=1,
            parts={"gates": gates, "clock": self._clock},
            **self.arrangement,
        )
        self.scheduler = self.harness.scheduler
        self.model = self.harness.model
        self.model.__class__ = SoakModel
        assert isinstance(self.model, SoakModel)
        self.model.start(random.Random(self.seed + 2), self.hiccups)
        policy, cache = self.scheduler.components.policy, self.harness.memory.cache
        policy.ctx = replace(policy.ctx, clock=self._clock)
        for owner, names in ((policy, ("order", "victims", "preempt")), (cache, ("insert", "extend"))):
            for name in names:
                setattr(owner, name, self._flaky(name, getattr(owner, name)))

    def _clock(self) -> float:
        return self.now

    def _gate(self, name: str, **options: Any) -> tuple[str, AdmissionGate]:
        record = Registry.discover(()).get("admission_gate", name)
        assert record is not None
        gate: AdmissionGate = record.load()(record.options_model()(**options), AdmissionGateContext(self._clock))
        return name, gate

    def _flaky(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Does what it should, and raises now and then: what it notes it notes first, what it changes it does not."""

        def flaky(*arguments: Any, **named: Any) -> Any:
            notes = name in {"requests_finished", "idle"}
            if notes:
                call(*arguments)
            if self.faults.random() < FAULTY:
                self.raised[name] += 1
                raise OSError(f"{name} is out of order")
            return None if notes else call(*arguments, **named)

        return flaky

    def _note_finished(self, reqs: Sequence[Req]) -> None:
        self.finished.update(req.rid for req in reqs)

    def _note_idle(self) -> None:
        self.told_idle += 1

    # ---- the run --------------------------------------------------------------------------------------------------

    def run(self, requests: int) -> None:
        """Bursts of arrivals, some into an idle scheduler and some into a busy one, until `requests` have come."""
        while len(self.sent) < requests:
            self._burst(min(requests - len(self.sent), self.rng.choice((1, 2, 5, 12, 40))))
            if self.rng.random() < 0.4:
                self._until_idle()
            else:
                self._step_some(self.rng.randrange(60))
        self._until_idle()
        self._judge()

    def _burst(self, count: int) -> None:
        fresh = [self._request() for _ in range(count)]
        messages = [
            TokenizedRequest(
                rid=one.rid,
                prompt=pack_ids(one.prompt),
                sampling=one.params,
                stream=self.rng.random() < 0.5,
                priority=self.rng.choice((0, 0, 0, 1, 5, 20)),
                params=one.asks,
            )
            for one in fresh
        ]
        mail: list[ToScheduler] = [TokenizedBatch(requests=messages)] if self.rng.random() < 0.5 else [*messages]
        at_once = [one for one in fresh if self.rng.random() < 0.02]
        mail += [AbortRequest(rid=one.rid) for one in at_once]
        replies = self.scheduler.receive(mail)
        assert [reply.rid for reply in replies] == [one.rid for one in fresh], "one answer for each, in order"  # type: ignore[union-attr]
        for one, reply in zip(fresh, replies, strict=True):
            if isinstance(reply, Accepted):
                self.sent[one.rid] = one
                if one in at_once:
                    one.aborted = True
                    self.aborted_in["new"] += 1
            else:
                self.rejected[reply.code] += 1  # type: ignore[union-attr]

    def _request(self) -> Sent:
        rng = self.rng
        own = [rng.randrange(LATE) for _ in range(rng.randint(1, 40))]
        prompt = own
        earlier = rng.choice(list(self.sent.values())[-20:]) if self.sent else None
        if earlier is not None and earlier.prompt[0] < LATE:
            kind = rng.random()
            if kind < 0.1:
                prompt = earlier.prompt
            elif kind < 0.4:
                prompt = earlier.prompt[: rng.randint(1, 60)] + own
            elif kind < 0.6:
                prompt = earlier.prompt + earlier.answer + own
        prompt = prompt[:LONGEST]
        doomed = rng.random() < 0.02
        if doomed and rng.random() < 0.5:
            prompt = [DOOMED, *prompt[1:]]
        elif doomed:
            prompt = [LATE, 0, *prompt[2:], 3]
            prompt[1] = len(prompt) + rng.randint(0, 3)
        n = 0 if rng.random() < 0.01 else rng.randint(1, MOST_NEW)
        stops = tuple(rng.randrange(VOCAB) for _ in range(3)) if rng.random() < 0.2 else ()
        params = SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=rng.random() < 0.3, stop_token_ids=stops)
        return Sent(f"r{next(self._numbers)}", prompt, params, _answer(prompt, params), doomed, self._asks())

    def _asks(self) -> dict[str, Any]:
        rng, asks = self.rng, {}
        if rng.random() < 0.1:
            asks["session"] = {"id": rng.choice("abcd")}
        if rng.random() < 0.15:
            act = rng.choice(("open", "delay", "delay", "fail", "never", "raise"))
            asks["drill"] = {"act": act, "delay": rng.choice((0.0, 0.05, 0.3)), "hold": rng.choice((0.0, 0.0, 0.1))}  # type: ignore[dict-item]
        return asks

    def _until_idle(self) -> None:
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            self._step()
        else:
            raise AssertionError(f"not idle: {self.scheduler.info()}")

    def _step_some(self, steps: int) -> None:
        for _ in range(steps):
            if not self.scheduler.idle:
                self._step()

    def _step(self) -> None:
        self.steps += 1
        self.now += TICK
        gone = self._abort_some() if self.rng.random() < self.aborts else []
        self.harness.step()
        alive = self.scheduler.requests.alive
        for rid in gone:
            assert rid not in alive, f"{rid} was aborted, and is still there after a step"
        assert not self.model.bugs, self.model.bugs  # type: ignore[attr-defined]
        self._audit()
        if self.scheduler.idle:
            self._at_idle()

    def _at_idle(self) -> None:
        self.idles += 1
        assert self.harness.memory.idle_error() is None
        counters = self.scheduler.counters
        assert counters.book_errors == 0
        assert counters.finished == counters.accepted == len(self.sent)
        assert not self._open(), "idle, and somebody waits for an answer"

    def _open(self) -> list[str]:
        """Requests whose end nobody has told, of those that came since the last idle."""
        outputs = self.harness.outputs
        fresh, self._settled = list(self.sent)[self._settled :], len(self.sent)
        return [rid for rid in fresh if rid not in outputs or outputs[rid][-1].finish_reason is None]

    # ---- aborts ---------------------------------------------------------------------------------------------------

    def _abort_some(self) -> list[str]:
        """Abort one request, everywhere alike; seldom all. Those that have to be gone after the next step."""
        places: dict[str, list[Req]] = {}
        for req in self.scheduler.requests.alive.values():
            places.setdefault(self._place(req), []).append(req)
        if not places:
            return []
        if self.rng.random() < 0.01:
            self.scheduler.receive([AbortRequest(all_requests=True)])
            chosen = [req for reqs in places.values() for req in reqs]
        else:
            req = self.rng.choice(places[self.rng.choice(sorted(places))])
            self.aborted_in[self._place(req)] += 1
            # What is under way in a split prefill keeps its slots until its last part.
            chosen = [req]
            self.scheduler.receive([AbortRequest(rid=req.rid), AbortRequest(rid="nobody"), AbortRequest(rid=req.rid)])
        for req in chosen:
            self.sent[req.rid].aborted = True
        return [req.rid for req in chosen if req not in self.scheduler.requests.late]

    def _place(self, req: Req) -> str:
        planner = self.scheduler.planner
        if planner.holds(req):
            return "split"
        if req is planner.chunked:
            return "chunked"
        return req.status.value

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _audit(self) -> None:
        """Every request is in one place, and every slot and row is somebody's and nobody else's."""
        scheduler, memory, planner = self.scheduler, self.harness.memory, self.scheduler.planner
        alive = list(scheduler.requests.alive.values())
        split = [req for step in planner.under_way for req in step.reqs]
        known = Counter(map(id, [*planner.waiting, *planner.running]))
        known.update({id(req) for req in [*split, planner.chunked] if req is not None and not req.finished})
        seated = [req for req in alive if req.kv.row != NO_ROW]
        for req in alive:
            if req.finished:
                assert req in scheduler.requests.late or req.status is ReqStatus.HELD, (
                    f"{req} has ended and is still here"
                )
            elif req.status is not ReqStatus.BLOCKED:
                assert known[id(req)] == 1, f"{req} is in {known[id(req)]} places"
                assert (req.kv.row != NO_ROW) == (req.status is ReqStatus.RUNNING), f"{req} has row {req.kv.row}"
        assert len(known) == sum(not req.finished and req.status is not ReqStatus.BLOCKED for req in alive)
        rows = [req.kv.row for req in seated]
        assert len(set(rows)) == len(rows) == memory.rows.taken
        assert sum(req.kv.allocated_len - req.kv.cache_len for req in seated) == memory.held_tokens
        own = [memory.rows.host[req.kv.row, req.kv.cache_len : req.kv.allocated_len] for req in seated]
        slots = np.concatenate(own) if own else np.empty(0, np.int32)
        assert len(np.unique(slots)) == len(slots), "a slot has two owners"

    def _judge(self) -> None:
        """Nothing was lost, nothing answered twice, and every answer is right up to its end."""
        harness, aborted = self.harness, 0
        unlucky: list[str] = []
        assert set(harness.outputs) == set(self.sent)
        assert self.finished == Counter(dict.fromkeys(self.sent, 1)), "hooks hear of every end once"
        for rid, one in self.sent.items():
            outputs = harness.outputs[rid]
            reason, tokens = harness.finish(rid), harness.tokens(rid)
            assert sum(output.finish_reason is not None for output in outputs) == 1
            last = outputs[-1]
            assert (last.prompt_tokens, last.completion_tokens) == (len(one.prompt), len(tokens)), rid
            if reason["type"] == "abort":
                aborted += 1
                assert tokens == one.answer[: len(tokens)], rid
                status, gate = reason["status"], one.asks.get("drill", {}).get("act")
                assert status in {SERVER, GATE.get(gate)} or (status == CLIENT and one.aborted), f"{rid}: {reason}"
                if status == SERVER and not one.doomed and gate != "raise":
                    unlucky.append(f"{rid}: {reason['message']}")
            else:
                assert one.asks.get("drill", {}).get("act") not in GATE, rid
                assert tokens == one.answer, rid
                stopped = bool(tokens) and _ends(tokens[-1], one.params)
                assert reason["type"] == ("stop" if stopped else "length"), rid
        counters = self.scheduler.counters
        model: Any = self.model
        assert len(unlucky) <= model.alone, unlucky
        assert counters.failed_batches <= model.hiccups + sum(one.doomed for one in self.sent.values())
        assert counters.aborted == aborted
        assert counters.accepted == counters.finished == len(self.sent)
        assert counters.rejected == sum(self.rejected.values())
        assert set(self.rejected) <= {"queue_full", "gate_failed", "failed_as_asked", "session_busy"}
        retractions = sum(outputs[-1].num_retractions for outputs in harness.outputs.values())
        assert retractions == counters.retractions

    def summary(self) -> dict[str, Any]:
        """What happened, for whoever wonders whether enough did."""
        counters = self.scheduler.counters
        return {
            "requests": len(self.sent),
            "steps": self.steps,
            "idles": self.idles,
            "aborts": dict(self.aborted_in),
            "rejected": dict(self.rejected),
            "raised": dict(self.raised),
            "failed_batches": counters.failed_batches,
            "retractions": counters.retractions,
            "preemptions": counters.preemptions,
            "ends": dict(Counter(self.harness.finish(rid)["type"] for rid in self.sent)),
        }


def _ends(token: int, params: SamplingParams) -> bool:
    return token in params.stop_token_ids or (token == EOS and not params.ignore_eos)


def _answer(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What a request alone in the world would get."""
    tokens = [*prompt]
    for _ in range(params.max_new_tokens or 0):
        tokens.append(next_token(np.array(tokens, np.int64)))
        if _ends(tokens[-1], params):
            break
    return tokens[len(prompt) :]
