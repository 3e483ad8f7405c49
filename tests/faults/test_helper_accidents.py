"""A helper process that is killed or stopped from outside is the server's accident: once more on a fresh one, then 503,
never 400, and not remembered. What a client sent is to blame for a crash, a time-out and too much memory only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.admission_gate import ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.plugins.grammar.constraint import Grammars
from pegboard.plugins.grammar.gate import GrammarGate
from pegboard.plugins.grammar.pool import GrammarPool, PoolLimits
from pegboard.plugins.grammar.worker import Start
from pegboard.toolkit.chat.chat_prompt import ChatPrompt
from pegboard.toolkit.chat.render_process import Rendered
from pegboard.toolkit.chat.rendering import RenderPool
from pegboard.toolkit.system.helper_process import computed
from pegboard_drills.grammars import EOS, ScriptedBackend, scripted_context

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

PATIENCE = 60.0
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LONG = "{% for i in range(25000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}b"
ACCIDENTS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.01)
    raise AssertionError(f"in vain: {what}")


def strike(at_work: Callable[[], Sequence[int]], number: int, times: int) -> None:
    """Send a signal to as many helpers, one after the other, each once it is at work."""
    seen: set[int] = set()
    for _ in range(times):
        pid = until(lambda: next((pid for pid in at_work() if pid not in seen), None), "a helper at work")
        seen.add(pid)
        os.kill(pid, number)


def spent(pid: int) -> float:
    """Computing time of a process."""
    return computed(pid) or 0.0


class TestGrammars:
    @pytest.fixture
    def slow(self, tmp_path: Path) -> tuple[Grammar, Callable[[], list[int]]]:
        """A grammar that takes a while, and the workers that have begun to compile it."""
        begun = tmp_path / "begun"
        begun.touch()
        return Grammar("regex", f"slow 1 {begun}"), lambda: [int(line) for line in begun.read_text().splitlines()]

    @pytest.fixture
    def pool(self, tmp_path: Path) -> Iterator[GrammarPool]:
        ctx = scripted_context(tmp_path)
        start = Start(
            factory="pegboard_drills.grammars:ScriptedBackend",
            options_model="pegboard.core.interfaces.options:NoOptions",
            options={},
            directory=str(ctx.directory),
            vocab_size=ctx.vocab_size,
            eos_token_ids=[EOS],
            memory=256 * 2**20,
        )
        pool = GrammarPool(start, ScriptedBackend(NoOptions(), ctx), PoolLimits(workers=1, compile_timeout=PATIENCE))
        yield pool
        pool.close()

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_one_accident_costs_time_only(self, pool: GrammarPool, slow: Any, number: int) -> None:
        grammar, at_work = slow
        future = pool.submit(grammar)
        strike(at_work, number, 1)
        assert future.result(PATIENCE).size_bytes
        assert pool.killed == 1
        assert len(at_work()) == 2

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_nor_does_one_while_a_worker_starts(self, pool: GrammarPool, slow: Any, number: int) -> None:
        grammar, at_work = slow
        future = pool.submit(grammar)
        strike(pool.pids, number, 1)
        assert future.result(PATIENCE).size_bytes
        assert pool.killed == 1
        assert len(at_work()) == 1

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_two_are_the_servers_fault_and_not_remembered(self, pool: GrammarPool, slow: Any, number: int) -> None:
        grammar, at_work = slow
        gate = GrammarGate(
            GrammarGate.make_options(),
            AdmissionGateContext(ManualClock()),
            pool=pool,
            grammars=Grammars(320, frozenset({EOS})),
        )
        sampling = SamplingParams(max_new_tokens=4, grammar=grammar)
        req = gated_request(rid="a", sampling=sampling)
        assert gate.enter(req).state.value == "blocked"
        strike(at_work, number, 2)
        verdict = until(lambda: gate.poll([req]), "a verdict")["a"]
        assert (verdict.status, verdict.code) == (503, "grammar_worker_lost")
        assert len(gate.cache) == 0
        assert pool.killed == 2
        again = gated_request(rid="b", sampling=sampling)
        assert gate.enter(again).state.value == "blocked"
        assert until(lambda: gate.poll([again]), "a verdict")["b"].state.value == "open"

    def test_one_that_was_stopped_while_idle_is_not_given_work_for_long(self, pool: GrammarPool) -> None:
        pool.submit(Grammar("regex", "tokens 5")).result(PATIENCE)
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGSTOP)
        assert pool.submit(Grammar("regex", "tokens 6")).result(PATIENCE / 2).size_bytes
        assert pool.pids() != [pid]


class TestTemplates:
    @pytest.fixture
    def pool(self) -> Iterator[RenderPool]:
        pool = RenderPool(helpers=1, seconds=PATIENCE)
        yield pool
        pool.close()

    @staticmethod
    def text(future: Future[Rendered]) -> str:
        return future.result(PATIENCE).text

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_one_accident_costs_time_only(self, pool: RenderPool, number: int) -> None:
        assert self.text(pool.submit(ChatPrompt(source="a", messages=[]))) == "a"
        os.kill(pool.pids()[0], number)
        assert self.text(pool.submit(ChatPrompt(source="b", messages=[]))) == "b"

    def test_one_while_it_renders_costs_time_only(self, pool: RenderPool) -> None:
        assert self.text(pool.submit(ChatPrompt(source="a", messages=[]))) == "a"
        (pid,) = pool.pids()
        ready = spent(pid)
        future = pool.submit(ChatPrompt(source=LONG, messages=[]))
        until(lambda: spent(pid) > ready + 0.1, "a helper that renders")
        assert not future.done()
        os.kill(pid, signal.SIGKILL)
        assert self.text(future) == "b"
        assert pool.pids() != [pid]

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_two_are_the_servers_fault(self, pool: RenderPool, number: int) -> None:
        assert self.text(pool.submit(ChatPrompt(source="a", messages=[]))) == "a"
        ready = spent(pool.pids()[0])
        future = pool.submit(ChatPrompt(source=ENDLESS, messages=[]))
        # By then each is through with its imports.
        strike(lambda: [pid for pid in pool.pids() if spent(pid) > 2 * ready + 0.2], number, 2)
        error = future.exception(PATIENCE)
        assert isinstance(error, InvalidRequest)
        assert (error.status, error.code) == (503, "template_helper_lost")
        assert self.text(pool.submit(ChatPrompt(source="b", messages=[]))) == "b"
