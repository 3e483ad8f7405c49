"""Compiling in helper processes: whatever a grammar does to its own, nobody else notices."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.frontend.intake import pack_ids
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.core.pipeline.arrivals import new_req
from pegboard.plugins.grammar.api import CompiledGrammar
from pegboard.plugins.grammar.constraint import Grammars
from pegboard.plugins.grammar.gate import GrammarGate
from pegboard.plugins.grammar.pool import GrammarPool, PoolLimits
from pegboard.plugins.grammar.queue import GrammarJob
from pegboard.plugins.grammar.worker import Start
from pegboard_drills.grammars import EOS, ScriptedBackend, ScriptedGrammar, scripted_context

PATIENCE = 60.0


def script(text: str) -> Grammar:
    return Grammar("regex", text)


def failure(future: Future[CompiledGrammar]) -> InvalidRequest:
    error = future.exception(PATIENCE)
    assert isinstance(error, InvalidRequest)
    return error


class Pools:
    """Pools of one test, closed at its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.made: list[GrammarPool] = []

    def __call__(
        self, *, factory: str = "", memory: int = 256 * 2**20, prepare: Any = None, **limits: float
    ) -> GrammarPool:
        ctx = scripted_context(self._directory)
        start = Start(
            factory=factory or "pegboard_drills.grammars:ScriptedBackend",
            options_model="pegboard.core.interfaces.options:NoOptions",
            options={},
            directory=str(ctx.directory),
            vocab_size=ctx.vocab_size,
            eos_token_ids=[EOS],
            memory=memory,
        )
        made = PoolLimits(**limits)  # type: ignore[arg-type]
        pool = GrammarPool(start, ScriptedBackend(NoOptions(), ctx), made, prepare)
        self.made.append(pool)
        return pool


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    pools = Pools(tmp_path)
    yield pools
    for pool in pools.made:
        pool.close()


def gone(pid: int) -> bool:
    """Whether a process has ended and nobody waits for its status."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def running(pool: GrammarPool) -> int:
    """How many compilations are under way."""
    return pool._queue._running


def test_a_grammar_comes_back_and_no_process_starts_before_it(pools: Pools) -> None:
    pool = pools(workers=2)
    assert pool.pids() == []
    compiled = pool.submit(script("tokens 7 8")).result(PATIENCE)
    assert isinstance(compiled, ScriptedGrammar)
    assert compiled.tokens == (7, 8)
    (pid,) = pool.pids()
    pool.submit(script("tokens 9")).result(PATIENCE)
    assert pool.pids() == [pid], "one worker does for one grammar after the other"
    pool.close()
    assert gone(pid)
    assert pool.pids() == []


def test_several_work_at_once_but_no_more_than_may(pools: Pools) -> None:
    pool = pools(workers=2, compile_timeout=30)
    slow = [pool.submit(script("slow 0.3")) for _ in range(5)]
    for one in slow:
        one.result(PATIENCE)
    assert 1 <= len(pool.pids()) <= 2
    assert pool.open == 0


@pytest.mark.parametrize("what", ["hang", "hang in C"])
def test_one_that_never_ends_fails_alone(pools: Pools, what: str) -> None:
    pool = pools(workers=1, compile_timeout=0.5)
    pool.submit(script("tokens 5")).result(PATIENCE)
    (before,) = pool.pids()
    error = failure(pool.submit(script(what)))
    assert (error.status, error.code, error.param) == (400, "grammar_timeout", "regex")
    assert "0.5 s" in error.message
    assert gone(before), "the worker that was at it is gone"
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes
    assert pool.pids() != [before]
    assert pool.killed == 1


def test_one_that_crashes_its_worker_fails_alone(pools: Pools) -> None:
    pool = pools(workers=1)
    error = failure(pool.submit(script("die")))
    assert (error.status, error.code, error.param) == (400, "grammar_failed", "regex")
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes


def test_one_that_eats_memory_fails_alone_and_its_worker_lives(pools: Pools) -> None:
    pool = pools(workers=1, memory=200 * 2**20)
    pool.submit(script("tokens 5")).result(PATIENCE)
    before = pool.pids()
    error = failure(pool.submit(script("eat")))
    assert (error.status, error.code, error.param) == (400, "grammar_too_large", "regex")
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes
    assert pool.pids() == before


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [("refuse", 400, "invalid_grammar"), ("raise", 400, "grammar_failed")],
)
def test_whatever_a_backend_raises_is_an_answer(pools: Pools, what: str, status: int, code: str) -> None:
    pool = pools(workers=1)
    error = failure(pool.submit(script(what)))
    assert (error.status, error.code, error.param) == (status, code, "regex")
    assert "as asked" in error.message
    assert pool.killed == 0


def test_a_library_that_prints_does_not_spoil_the_messages(pools: Pools) -> None:
    pool = pools(workers=1)
    assert pool.submit(script("print")).result(PATIENCE).size_bytes
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes


def test_a_backend_that_cannot_start_is_the_servers_fault(pools: Pools) -> None:
    pool = pools(workers=1, factory="pegboard_drills.grammars:Missing")
    error = failure(pool.submit(script("tokens 5")))
    assert (error.status, error.code) == (500, "grammar_worker_failed")
    assert "Missing" in error.message


@pytest.mark.parametrize("what", ["broken", "trap matcher", "trap fill", "trap accept"])
def test_what_cannot_be_used_is_found_out_by_the_worker(pools: Pools, what: str) -> None:
    error = failure(pools(workers=1).submit(script(what)))
    assert (error.status, error.code) == (400, "grammar_failed")
    assert "as asked" in error.message


@pytest.mark.parametrize("where", ["fill", "accept", "forced"])
def test_a_matcher_that_hangs_does_so_in_the_worker(pools: Pools, where: str) -> None:
    pool = pools(workers=1, compile_timeout=0.5)
    pool.submit(script("tokens 5")).result(PATIENCE)
    error = failure(pool.submit(script(f"trap hang-{where}")))
    assert (error.status, error.code) == (400, "grammar_timeout")


def test_the_queue_is_bounded(pools: Pools) -> None:
    pool = pools(workers=1, max_queued=2, compile_timeout=30)
    waiting = [pool.submit(script("slow 0.2")) for _ in range(3)]
    assert pool.full
    for one in waiting:
        one.result(PATIENCE)
    assert not pool.full


def test_whoever_waits_too_long_for_a_worker_is_told(pools: Pools) -> None:
    pool = pools(workers=1, queue_timeout=1.0, compile_timeout=30, first_slice=30)
    first, second = pool.submit(script("slow 3")), pool.submit(script("tokens 5"))
    assert first.result(PATIENCE).size_bytes
    error = failure(second)
    assert (error.status, error.code) == (503, "grammar_queue_full")


def test_closing_ends_a_compilation_under_way(pools: Pools) -> None:
    pool = pools(workers=2, compile_timeout=600)
    pool.submit(script("tokens 5")).result(PATIENCE)
    running, waiting = pool.submit(script("hang")), [pool.submit(script("hang")) for _ in range(4)]
    deadline = time.monotonic() + PATIENCE
    while len(pool.pids()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    pids = pool.pids()
    pool.close()
    assert pids
    assert all(gone(pid) for pid in pids)
    assert all(one.done() for one in [running, *waiting])
    pool.close()


def test_a_panic_while_loading_fails_one_grammar(pools: Pools) -> None:
    class Panic(BaseException):
        """As libraries in Rust raise it."""

    def prepare(compiled: ScriptedGrammar) -> ScriptedGrammar:
        if compiled.tokens == (9,):
            raise Panic("as asked")
        return compiled

    pool = pools(workers=1, prepare=prepare)
    error = pool.submit(script("tokens 9")).exception(PATIENCE)
    assert isinstance(error, RuntimeError)
    assert "Panic: as asked" in str(error)
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes
    assert (pool.open, running(pool)) == (0, 0)


def test_grammars_queue_under_the_key_of_their_client(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools(workers=1)
    queued: list[GrammarJob] = []

    def put(job: GrammarJob) -> int:
        queued.append(job)
        return 0

    monkeypatch.setattr(pool._queue, "put", put)
    grammars = Grammars(320, frozenset({EOS}))
    gate = GrammarGate(GrammarGate.make_options(), AdmissionGateContext(ManualClock()), pool=pool, grammars=grammars)
    for owner in ("a", "b"):
        gate.enter(asked(f"tokens 5 {owner}", owner))
    assert [job.owner for job in queued] == ["a", "b"]


def asked(text: str, owner: str) -> Req:
    sampling = SamplingParams(max_new_tokens=4, grammar=script(text))
    message = TokenizedRequest(rid=text, prompt=pack_ids([1]), sampling=sampling, principal=owner)
    return new_req(message, frozenset({EOS}), np.random.default_rng(0), 0.0)


def test_a_full_queue_is_shared_by_keys(pools: Pools) -> None:
    pool = pools(workers=1, max_queued=3, compile_timeout=600)
    grammars = Grammars(320, frozenset({EOS}))
    gate = GrammarGate(GrammarGate.make_options(), AdmissionGateContext(ManualClock()), pool=pool, grammars=grammars)
    first = asked("hang", "a")
    assert gate.enter(first).state.value == "blocked"
    deadline = time.monotonic() + PATIENCE
    while running(pool) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    reqs = [first] + [asked("hang" + " " * number, "a") for number in range(1, 4)]
    assert {gate.enter(req).state.value for req in reqs[1:]} == {"blocked"}
    assert pool.full
    more = gate.enter(asked("hang" + " " * 4, "a"))
    assert (more.status, more.code) == (503, "grammar_queue_full")
    assert gate.enter(asked("tokens 5", "b")).state.value == "blocked"
    found = gate.poll(reqs)
    assert {rid: (one.status, one.code) for rid, one in found.items()} == {reqs[3].rid: (503, "grammar_queue_full")}, (
        "the newest of the key that has most"
    )
    assert pool.full
    assert len(gate.cache) == 0


def test_a_closed_pool_takes_nothing(pools: Pools) -> None:
    pool = pools(workers=1)
    pool.close()
    futures: list[Future[CompiledGrammar]] = []
    thread = threading.Thread(target=lambda: futures.append(pool.submit(script("tokens 5"))), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert [one.cancelled() for one in futures] == [True]
    assert pool.open == 0


def test_a_worker_that_was_killed_from_outside_is_replaced(pools: Pools) -> None:
    pool = pools(workers=1)
    pool.submit(script("tokens 5")).result(PATIENCE)
    (pid,) = pool.pids()
    os.kill(pid, 9)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes
    assert pool.pids() != [pid]


def test_slow_grammars_do_not_hold_up_a_quick_one(pools: Pools) -> None:
    """Behind six that take all their time it would wait for three minutes. They come to their end afterwards."""
    pool = pools(workers=2, compile_timeout=60, first_slice=0.1)
    slow = [pool.submit(script("hang" + " " * number), "an owner") for number in range(1, 7)]
    assert pool.submit(script("tokens 5"), "another").result(PATIENCE).size_bytes
    assert not any(one.done() for one in slow)
    late = pool.submit(script("tokens 6"), "an owner")
    assert late.result(PATIENCE).size_bytes, "its own slow ones do not hold it up either"
    assert not any(one.done() for one in slow)


def test_one_that_gave_way_is_compiled_in_the_end(pools: Pools, tmp_path: Path) -> None:
    pool = pools(workers=1, compile_timeout=30, first_slice=0.1)
    begun = tmp_path / "begun"
    begun.touch()
    slow = pool.submit(script(f"slow 1 {begun}"))
    deadline = time.monotonic() + PATIENCE
    while not begun.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.submit(script("tokens 5")).result(PATIENCE).size_bytes
    assert slow.result(PATIENCE).size_bytes
    first, second = begun.read_text().split()
    assert first != second, "it gave way, and began again in another worker"
    assert pool.killed == 0, "the first was as good as any"


def test_one_that_is_not_wanted_any_more_leaves_its_worker(pools: Pools) -> None:
    pool = pools(workers=1, compile_timeout=600)
    pool.submit(script("tokens 5")).result(PATIENCE)
    (before,) = pool.pids()
    endless = pool.submit(script("hang"))
    assert endless.cancel()
    assert pool.submit(script("tokens 6")).result(PATIENCE).size_bytes
    assert pool.pids() == [before], "it had not begun"
    endless = pool.submit(script("hang"))
    deadline = time.monotonic() + PATIENCE
    while running(pool) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert endless.cancel()
    assert pool.submit(script("tokens 7")).result(PATIENCE).size_bytes
    assert gone(before)
    assert pool.killed == 0
