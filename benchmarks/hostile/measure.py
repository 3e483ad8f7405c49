"""One attack on one server: started for it, watched from outside, and asked to stop behind it."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hostile import media
from benchmarks.hostile.attacks import Attack
from benchmarks.hostile.clients import OPEN
from benchmarks.peers.processes import (
    Running,
    ServerError,
    checkout_python,
    first_answer,
    free_port,
    post,
    running,
    wait_healthy,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = "demo:smollm2-135m-instruct"
MEDIA_MODEL = str(ROOT / "examples" / "shapes" / "model")
"""For attacks that need one that takes pictures."""
CLIENTS, STREAMS = 4, 8
START_S = 300.0
"""A first start compiles the native runner."""
SHUTDOWN_S = 5.0
"""`server.shutdown_timeout`."""
STOP_BOUND_S = 2 * SHUTDOWN_S
"""Within which a server that is asked to stop has to end."""
STOP_S = 60.0
"""For which it is waited for."""
SAMPLE_S = 0.05
CONFIG: dict[str, Any] = {
    "model": {"path": MODEL, "served_name": "m"},
    "memory": {"max_total_tokens": 16384},
    "server": {"host": "127.0.0.1", "shutdown_timeout": SHUTDOWN_S},
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkout of Pegboard that is measured."""

    name: str
    python: Path

    @classmethod
    def at(cls, name: str, path: Path) -> Subject:
        """From a checkout with its .venv, or its Python. Raises ServerError."""
        return cls(name, checkout_python(path))


@dataclass(slots=True)
class Times:
    """How long what takes, in seconds."""

    quiet: float = 10.0
    """The honest clients alone, before."""
    attack: float = 20.0
    """While attackers send."""
    patience: float = 60.0
    """Until the answers to what was sent are there, from the beginning of the attack."""


def measure(attack: Attack, subject: Subject, times: Times, logs: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures of one attack on one subject. Raises ServerError where no server comes up."""
    port = free_port()
    config = logs / f"{attack.name}-{subject.name}.json"
    path = MEDIA_MODEL if attack.is_media else MODEL
    settings = {**CONFIG, "model": {**CONFIG["model"], "path": path}, "server": {**CONFIG["server"], "port": port}}
    config.write_text(json.dumps(settings), "utf-8")
    command = [str(subject.python), "-m", "pegboard", "serve", str(config)]
    log = config.with_suffix(".log")
    with running(subject.name, command, f"http://127.0.0.1:{port}", log) as server:
        # Pegboard answers for its health while it loads.
        wait_healthy(server, START_S, "/ready")
        if attack.is_media:
            one = media.honest(random.Random(1))
            post(server, one.path, json.loads(one.body))
        else:
            first_answer(server, "m", START_S)
        return _watched(attack, server, times, say)


def _watched(attack: Attack, server: Running, times: Times, say: Callable[[str], None]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        attackers = [
            stack.enter_context(
                Client("attack", server.url, "--name", attack.name, "--client", i, "--seconds", times.attack)
            )
            for i in range(CLIENTS)
        ]
        health = stack.enter_context(Client("health", server.url))
        short = ["--short"] if attack.is_media else []
        streams = stack.enter_context(Client("streams", server.url, "--clients", STREAMS, *short))
        beside = stack.enter_context(Client(attack.beside, server.url)) if attack.beside else None
        honest = [health, streams, *([beside] if beside else [])]
        memory = stack.enter_context(Memory(psutil.Process(server.process.pid)))
        for client in (*attackers, *honest):
            client.wait_ready()
        for client in honest:
            client.tell()
        began = time.perf_counter()
        time.sleep(times.quiet)
        quiet = memory.peaks()
        start = time.perf_counter()
        for client in attackers:
            client.tell()
        while any(one.running for one in attackers) and time.perf_counter() < start + times.patience:
            time.sleep(0.1)
        say(f"   attacked for {time.perf_counter() - start:.0f} s")
        attacked = [one.result() for one in attackers]
        time.sleep(attack.tail)
        end = time.perf_counter()
        seen = {one.kind: one.result() for one in honest}
    found = {
        "seconds": round(end - start, 1),
        "quiet": _honest(seen, began + 2, start),
        "attacked": {**_honest(seen, start, end, last=True), **_ends(seen["streams"])},
        "attack": _attackers(attacked),
        "memory": {"quiet": quiet, "peak": memory.peaks()},
        "restarts": memory.restarts,
        "scheduler": _scheduler(server),
        "lag_s": seen["health"]["lag"],
    }
    if beside is not None:
        asked = seen[attack.beside]["asked"]
        found["beside"] = {"quiet": _beside(asked, began + 2, start), "attacked": _beside(asked, start, end)}
    return {**found, "stop": _stop(server)}


# ---- clients --------------------------------------------------------------------------------------------------------


class Client:
    """A process of `benchmarks.hostile.clients`."""

    def __init__(self, kind: str, url: str, *words: object) -> None:
        self.kind = kind
        command = [sys.executable, "-m", "benchmarks.hostile.clients", kind, url, *map(str, words)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    @property
    def running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises ServerError where it ends instead."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise ServerError(f"a client of the kind {self.kind!r} did not start")

    def tell(self) -> None:
        """To begin, or to end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Return what it has seen; it is asked to end."""
        self.tell()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"a client of the kind {self.kind!r} ended without a result")
        self._process.wait()
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise ServerError(f"a client of the kind {self.kind!r} failed: {found['failed']}")
        return found


# ---- memory ---------------------------------------------------------------------------------------------------------


class Memory:
    """Samples the resident memory of a server's processes, in a thread."""

    def __init__(self, api: psutil.Process) -> None:
        self._api = api
        self._peaks = {"api": 0, "scheduler": 0}
        self._scheduler = scheduler_of(self._api)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.restarts = 0
        """How often there was another scheduler process."""

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def peaks(self) -> dict[str, int]:
        """Return the largest sizes in bytes so far, by process."""
        return dict(self._peaks)

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                self._sample("api", self._api)
            try:
                if self._scheduler is None:
                    self._scheduler = scheduler_of(self._api)
                    self.restarts += self._scheduler is not None
                else:
                    self._sample("scheduler", self._scheduler)
            except psutil.Error:
                self._scheduler = None

    def _sample(self, name: str, process: psutil.Process) -> None:
        self._peaks[name] = max(self._peaks[name], process.memory_info().rss)


def scheduler_of(api: psutil.Process) -> psutil.Process | None:
    """Return the scheduler's process of a server."""
    with contextlib.suppress(psutil.Error):
        for one in api.children():
            with contextlib.suppress(psutil.Error):
                if "pegboard.core.server.scheduler_process" in one.cmdline():
                    return one
    return None


# ---- figures --------------------------------------------------------------------------------------------------------


def _honest(seen: dict[str, Any], start: float, end: float, *, last: bool = False) -> dict[str, Any]:
    """Return what health and streams were like within a time. `last`: it is the one up to the clients' end."""
    asked = [one for one in seen["health"]["asked"] if start <= one[0] < end]
    streams = seen["streams"]
    gaps = list(_within(streams["gaps"], start, end))
    firsts = list(_within(streams["firsts"], start, end))
    silent: list[float] = []
    if last:
        # Streams that are silent at the end have been so until then.
        silent, firsts = streams["silent"], [*firsts, *streams["waiting"]]
    return {
        "health_s": figures([seconds for _, seconds, _ in asked]),
        "health_failed": sum(status not in (200, OPEN) for *_, status in asked),
        "health_open": sum(status == OPEN for *_, status in asked),
        "gap_s": figures(gaps),
        "first_s": figures(firsts),
        "silence_s": max([*gaps, *silent], default=0.0),
        "events_per_s": round(len(gaps) / (end - start), 1),
    }


def _within(found: Sequence[tuple[float, float]], start: float, end: float) -> Iterator[float]:
    return (seconds for at, seconds in found if start <= at < end)


def figures(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and largest of some values; nothing of none."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * (len(ordered) - 1))], "max": ordered[-1]}


def _ends(streams: dict[str, Any]) -> dict[str, Any]:
    """Return what became of the honest streams, and of their tokens."""
    ended = streams["ended"]
    counted = [one for one in ended if "counted" in one]
    return {
        "streams": Counter(one["outcome"] for one in ended),
        "lost_tokens": sum(one["counted"] - one["sent"] for one in counted),
        "counted_tokens": sum(one["counted"] for one in counted),
    }


def _attackers(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for one in results:
        outcomes.update(one["outcomes"])
    sent = sum(one["sent"] for one in results)
    return {
        "sent": sent,
        "outcomes": outcomes,
        "unanswered": sent - sum(outcomes.values()),
        "slowest_s": max(one["slowest"] for one in results),
    }


def _beside(asked: Sequence[tuple[float, float, str]], start: float, end: float) -> dict[str, Any]:
    within = [one for one in asked if start <= one[0] < end]
    return {
        "seconds": figures([seconds for _, seconds, _ in within]),
        "outcomes": Counter(outcome for *_, outcome in within),
    }


def _scheduler(server: Running) -> dict[str, Any]:
    """Return what it says of itself, where it says anything; the books among it."""
    names = ("book_errors", "failed_batches", "running_requests", "waiting_requests", "held_tokens", "locked_tokens")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{server.url}/server_info", timeout=2) as answer:
            state = json.load(answer)["scheduler"]
        return {name: state[name] for name in names if name in state}
    except (OSError, ValueError, KeyError) as error:
        return {"error": repr(error)}


def _stop(server: Running) -> dict[str, Any]:
    """SIGTERM, and how long it takes."""
    start = time.perf_counter()
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(STOP_S)
    code = server.process.poll()
    return {"seconds": time.perf_counter() - start, "code": code, "in_time": code == 0 and _since(start) < STOP_BOUND_S}


def _since(start: float) -> float:
    return time.perf_counter() - start
