"""The supervisor: real processes without a model, and time that is only counted."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.interfaces.client import ModelInfo
from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.core.server import supervisor as module
from pegboard.core.server.client import AsyncEngineClient
from pegboard.core.server.supervisor import Backoff, Silence, Supervisor


class Listener:
    """A client as `Silence` knows it. Time passes only in its `sleep`; it ends the test when that is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Callable[[float], bool], end: float) -> None:
        self.now = 0.0
        self.heard = 0
        self.pings: list[float] = []
        self._answers = answers
        self._end = end
        monkeypatch.setattr(module.asyncio, "sleep", self.sleep)  # type: ignore[attr-defined]

    def ping(self) -> None:
        self.pings.append(self.now)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self._end:
            raise TimeoutError("it goes on")
        if self._answers(self.now):
            self.heard += 1


def listen(silence: Silence, client: Listener) -> str:
    scene = silence.of(client)  # type: ignore[arg-type]
    return asyncio.run(scene)


def test_a_talking_scheduler_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Listener(monkeypatch, lambda now: True, end=10_000)
    with pytest.raises(TimeoutError):
        listen(Silence(300.0), client)
    assert client.pings == []


def test_a_scheduler_that_answers_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Listener(monkeypatch, lambda now: bool(client.pings) and client.pings[-1] > now - 6, end=10_000)
    with pytest.raises(TimeoutError):
        listen(Silence(300.0), client)
    assert len(client.pings) > 500


def test_a_step_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the scheduler's own watchdog acts first, up to a quarter after that."""
    client = Listener(monkeypatch, lambda now: now % 375 < 5, end=10_000)
    with pytest.raises(TimeoutError):
        listen(Silence(300.0), client)
    assert client.pings


def test_silence_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Listener(monkeypatch, lambda now: now < 1000, end=10_000)
    assert listen(Silence(300.0), client) == "did not answer for 377 s (stopped or hung), and was killed"
    assert len(client.pings) == 1
    assert 1375 <= client.now <= 1400


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedConfig:
    """A config whose scheduler has no model; its sockets lie in the test's folder."""
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_tokenizer(model)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return compose(data={"model": {"path": str(model)}}, env={})


def made(resolved: ResolvedConfig) -> Supervisor:
    return Supervisor(resolved, builder="fake_scheduler:build", backoff=Backoff(first=0.0))


def nothing_is_left(tmp_path: Path) -> bool:
    children = psutil.Process().children()
    ours = [one for one in children if "pegboard.core.server.scheduler_process" in " ".join(one.cmdline())]
    return not ours and not list(tmp_path.glob("pegboard-*"))


def run(scene: Awaitable[None]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scene, 120)

    asyncio.run(whole())


def test_cancelled_while_it_is_spawned(
    resolved: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = asyncio.create_subprocess_exec
    entered = asyncio.Event()

    async def slow_spawn(*args: Any, **kwargs: Any) -> Any:
        process = await spawn(*args, **kwargs)
        entered.set()
        await asyncio.sleep(0.05)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_spawn)

    async def scene() -> None:
        starting = asyncio.ensure_future(made(resolved).start())
        await entered.wait()
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()

    run(scene())
    assert nothing_is_left(tmp_path)


def test_cancelled_before_it_is_spawned(resolved: ResolvedConfig, tmp_path: Path) -> None:
    async def scene() -> None:
        starting = asyncio.ensure_future(made(resolved).start())
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})

    run(scene())
    assert nothing_is_left(tmp_path)


def test_what_cannot_be_spawned(resolved: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no memory for a process")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)

    async def scene() -> None:
        with pytest.raises(PegboardError, match="no memory for a process"):
            await made(resolved).start()

    run(scene())
    assert nothing_is_left(tmp_path)


def test_stopping_that_is_interrupted_goes_on(
    resolved: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        supervisor = made(resolved)
        await supervisor.start()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        stopping = asyncio.ensure_future(supervisor.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        assert not nothing_is_left(tmp_path)
        monkeypatch.setattr(module, "STOP_TIMEOUT", 0.0)
        await supervisor.stop()
        assert supervisor.pid is None

    run(scene())
    assert nothing_is_left(tmp_path)


class SilentOnce:
    """Finds any scheduler silent at once, the first time."""

    def __init__(self) -> None:
        self.asked = 0

    async def of(self, client: AsyncEngineClient) -> str:
        self.asked += 1
        if self.asked == 1:
            return "said nothing"
        await asyncio.Event().wait()
        raise AssertionError


def test_silence_counts_only_once_it_has_loaded(resolved: ResolvedConfig, tmp_path: Path) -> None:
    async def scene() -> None:
        supervisor = made(resolved)
        supervisor._silence = silence = SilentOnce()  # type: ignore[assignment]
        wire, ready = await supervisor.start()
        first = supervisor.pid
        assert silence.asked == 0
        client = AsyncEngineClient(ModelInfo(**ready.info), FakeTokenizer())
        client.attach(wire, client.info)
        watching = asyncio.ensure_future(supervisor.watch(client))
        while not (client.ready and supervisor.pid != first):
            await asyncio.sleep(0.01)
        assert first is not None
        assert not psutil.pid_exists(first)
        await client.server_info()
        watching.cancel()
        client.detach("the test is over")
        await supervisor.stop()

    run(scene())
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("builder", "temporary"), [("build_and_die", True), ("build_no_cluster", True), ("build_nothing", False)]
)
def test_what_another_start_may_mend(resolved: ResolvedConfig, builder: str, temporary: bool) -> None:
    """The command exits by 1 then, after which a service manager starts it again; a wrong model stays wrong."""

    async def scene() -> None:
        with pytest.raises(PegboardError) as raised:
            await Supervisor(resolved, builder=f"fake_scheduler:{builder}").start()
        assert isinstance(raised.value, Temporary) == temporary

    run(scene())
