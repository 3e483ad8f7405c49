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

from pegboard.core.grammar_worker import Start
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.grammar import Grammars
from pegboard.core.pipeline.grammar_gate import GrammarGate
from pegboard.core.pipeline.grammar_pool import GrammarPool, PoolLimits
from pegboard.core.testing.admission_gate import ManualClock, gated_request
from pegboard.core.testing.grammar_fakes import EOS, ScriptedBackend, scripted_context
from pegboard.core.toolkit.chat_prompt import ChatPrompt
from pegboard.core.toolkit.rendering import RenderPool

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

PATIENCE = 60.0
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ACCIDENTS = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.01)
    raise AssertionError(f"in vain: {what}")


def strike(pids: Callable[[], Sequence[int]], number: int, times: int, done: Callable[[], bool]) -> None:
    """Send a signal to as many helpers, one after the other, each while it is at work."""
    seen: set[int] = set()
    for _ in range(times):
        (pid,) = until(lambda: [pid for pid in pids() if pid not in seen], "a helper that was not struck yet")
        seen.add(pid)
        until(lambda pid=pid: _computed(pid) > 0.02, "a helper at work")  # type: ignore[misc]
        assert not done()
        os.kill(pid, number)


def _computed(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class TestGrammars:
    @pytest.fixture
    def pool(self, tmp_path: Path) -> Iterator[GrammarPool]:
        ctx = scripted_context(tmp_path)
        start = Start(
            factory="pegboard.core.testing.grammar_fakes:ScriptedBackend",
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
    def test_one_accident_costs_time_only(self, pool: GrammarPool, number: int) -> None:
        future = pool.submit(Grammar("regex", "slow 1.5"))
        strike(pool.pids, number, 1, future.done)
        assert future.result(PATIENCE).size_bytes
        assert pool.killed <= 1

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_two_are_the_servers_fault_and_not_remembered(self, pool: GrammarPool, number: int) -> None:
        gate = GrammarGate(
            GrammarGate.make_options(),
            AdmissionGateContext(ManualClock()),
            pool=pool,
            grammars=Grammars(320, frozenset({EOS})),
        )
        sampling = SamplingParams(max_new_tokens=4, grammar=Grammar("regex", "slow 1.5"))
        req = gated_request(rid="a", sampling=sampling)
        assert gate.enter(req).state.value == "blocked"
        strike(pool.pids, number, 2, lambda: pool.open == 0)
        verdict = until(lambda: gate.poll([req]), "a verdict")["a"]
        assert (verdict.status, verdict.code) == (503, "grammar_worker_lost")
        assert len(gate.cache) == 0
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
    def pids(pool: RenderPool) -> list[int]:
        return [one._process.pid for one in list(pool._helpers)]

    @staticmethod
    def text(future: Future[str]) -> str:
        return future.result(PATIENCE)

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_one_accident_costs_time_only(self, pool: RenderPool, number: int) -> None:
        assert self.text(pool.submit(ChatPrompt(source="a", messages=[]))) == "a"
        os.kill(self.pids(pool)[0], number)
        assert self.text(pool.submit(ChatPrompt(source="b", messages=[]))) == "b"

    @pytest.mark.parametrize("number", ACCIDENTS)
    def test_two_are_the_servers_fault(self, pool: RenderPool, number: int) -> None:
        future = pool.submit(ChatPrompt(source=ENDLESS, messages=[]))
        strike(lambda: self.pids(pool), number, 2, future.done)
        error = future.exception(PATIENCE)
        assert isinstance(error, InvalidRequest)
        assert (error.status, error.code) == (503, "template_helper_lost")
        assert self.text(pool.submit(ChatPrompt(source="b", messages=[]))) == "b"
