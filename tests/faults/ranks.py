"""Kill, stop and break ranks at random moments while several clients are answered, again and again.

    python tests/faults/ranks.py --deaths 40

Every answer is compared with that of transformers. A client whose request was running learns which rank has ended, and
how; one that comes while ranks start anew gets 503. At the end no process, socket or file of a server is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx
import psutil

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from tests.e2e.reference import Answer, Comparison, Reference

FOLLOWER, SCHEDULER = "pegboard.core.server.follower_process", "pegboard.core.server.scheduler_process"
SHARED_MEMORY, DRILLS = Path("/dev/shm"), Path(__file__).parents[1] / "drills"

PATIENCE = 120.0
SILENT = 6.0
"""`parallel.timeout`, and half of `scheduler.watchdog_timeout`: a rank may be slower on a busy machine than on an idle
one."""
CLIENTS = 3
LENGTH = 48
LATEST = 1.5
"""Seconds from the first answers to a death, at most."""
DEATHS_EACH = 4
"""Deaths of one server: after five within ten minutes it gives up."""
STARTING = "the engine is starting"
PROMPTS = ([5, 6, 7, 8], [9, 10, 11] * 20, [40, 41] * 9, [9, 10, 11] * 15 + [3], [77, 3, 4, 5, 6], [200] * 30)

HOW = ("kill", "stop", "raise", "leave")
SAID = {
    ("kill", 0): "was ended by signal 9",
    ("kill", 1): "(process {pid}) was ended by signal 9",
    ("stop", 0): "did not answer for",
    ("stop", 1): f"(process {{pid}}) has not answered for {SILENT:g} s",
    ("raise", 0): "RuntimeError: a drill",
    ("raise", 1): "(process {pid}) failed: RuntimeError: a drill",
    ("leave", 0): "exited with code 0",
    ("leave", 1): "(process {pid}) exited with code 0",
}
"""What a client is told, by how a rank ends and whether it is rank 0 (0) or another (1)."""


@dataclass
class Summary:
    deaths: list[str] = field(default_factory=list)
    answered: int = 0
    told: int = 0
    """Requests that were told which rank has ended."""
    refused: int = 0
    """Requests that came while ranks started anew."""
    waits: list[float] = field(default_factory=list)
    """Seconds from a death until all requests that were running had been told."""
    starts: list[float] = field(default_factory=list)
    """Seconds from a death until the server was ready."""

    def __str__(self) -> str:
        return (
            f"{len(self.deaths)} deaths; {self.answered} requests answered, {self.told} told why not, {self.refused} "
            f"refused meanwhile; told after at most {max(self.waits):.1f} s, "
            f"ready after at most {max(self.starts):.1f} s"
        )


@dataclass(frozen=True)
class World:
    """A model, and what it answers."""

    model: Path
    expected: Sequence[Answer]
    tensor: int = 2

    def config(self, drills: Path, timeout: float = SILENT) -> dict[str, Any]:
        return {
            "model": {"path": str(self.model), "dtype": "float32", "device": "cpu"},
            "runner": {"use": "layered"},
            "attention": {"use": "torch"},
            "memory": {"max_total_tokens": 4096},
            "scheduler": {"watchdog_timeout": 2 * SILENT, "loop": "overlap"},
            "plugins": {"rank_drill": {"directory": str(drills)}},
            "parallel": {"tensor": self.tensor, "cores": self.tensor, "timeout": timeout},
        }


def make_world(scratch: Path, tensor: int = 2) -> World:
    model = tiny_checkpoint(scratch, "llama", num_hidden_layers=2)
    return World(model, Reference(model, scratch / "reference").answers(PROMPTS, LENGTH), tensor)


def until(found: Callable[[], Any], what: str, every: float = 0.05) -> Any:
    end = time.monotonic() + PATIENCE
    while not (it := found()):
        assert time.monotonic() < end, f"{what}: it does not happen"
        time.sleep(every)
    return it


def processes(server: Served, module: str) -> list[psutil.Process]:
    """Return those of a module, in the order of their start: followers are started by their ranks."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if module in process.cmdline():
                found.append((process.create_time(), process.pid, process))
        except psutil.Error:  # it has ended, or is ending
            continue
    return [process for *_, process in sorted(found, key=lambda one: one[:2])]


def ranks(server: Served) -> list[psutil.Process]:
    return processes(server, SCHEDULER) + processes(server, FOLLOWER)


class Clients:
    """Some that ask one thing after the other."""

    def __init__(self, server: Served, seed: str) -> None:
        self.got: list[tuple[float, int, httpx.Response]] = []
        """When, of which prompt, and what."""
        self.wrong: list[str] = []
        self._server, self._ending, self._lock = server, threading.Event(), threading.Lock()
        chances = [random.Random(f"{seed} {number}") for number in range(CLIENTS)]
        self._threads = [threading.Thread(target=self._ask, args=(chance,)) for chance in chances]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, chance: random.Random) -> None:
        with httpx.Client(base_url=self._server.address, timeout=PATIENCE) as client:
            while not self._ending.is_set():
                number = chance.randrange(len(PROMPTS))
                try:
                    answer = generate(client, PROMPTS[number])
                except httpx.HTTPError as error:
                    self.wrong.append(f"a client got no answer: {error!r}")
                    return
                with self._lock:
                    self.got.append((time.monotonic(), number, answer))
                if answer.status_code == 503:
                    time.sleep(0.25)


def generate(client: httpx.Client, prompt: Sequence[int], length: int = LENGTH) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    return client.post("/generate", json={"input_ids": list(prompt), "sampling_params": params})


def ready(server: Served, before: Sequence[psutil.Process], tensor: int) -> None:
    """Wait until ranks other than those are ready."""
    gone = {process.pid for process in before}

    def again() -> bool:
        now = {process.pid for process in ranks(server)}
        return len(now) == tensor and not now & gone and httpx.get(f"{server.address}/ready").status_code == 200

    until(again, "the server is ready again", 0.25)


def end_rank(process: psutil.Process, how: str, drills: Path) -> None:
    if how == "kill":
        process.kill()
    elif how == "stop":
        process.suspend()
    else:
        scratch = drills / f"new-{process.pid}"
        scratch.write_text(how)
        scratch.rename(drills / str(process.pid))


def death(server: Served, world: World, drills: Path, how: str, index: int, twice: bool, summary: Summary) -> None:
    """Answer clients, end a rank, and check what they are told. `twice`: the ranks that start then end as well."""
    chance = random.Random(f"{how} {index} {len(summary.deaths)}")
    clients, before = Clients(server, f"{how} {index} {len(summary.deaths)}"), ranks(server)
    assert len(before) == world.tensor
    try:
        until(lambda: len(clients.got) >= CLIENTS or clients.wrong, "requests are answered")
        time.sleep(chance.uniform(0, LATEST))
        ended = time.monotonic()
        end_rank(before[index], how, drills)
        said = SAID[how, min(index, 1)].format(pid=before[index].pid)
        if twice:
            again = until(
                lambda: {one.pid: one for one in ranks(server)}.keys() - {one.pid for one in before}, "a start"
            )
            time.sleep(chance.uniform(0, 3.0))
            kill_one_of(sorted(again), chance)
        ready(server, before, world.tensor)
        summary.starts.append(time.monotonic() - ended)
        count = len(clients.got)
        until(lambda: len(clients.got) >= count + 2 * CLIENTS or clients.wrong, "requests are answered again")
    finally:
        clients.end()
    check(clients, world, said, ended, summary)
    _, left = psutil.wait_procs(before, PATIENCE)
    assert not left, f"{left} go on"
    summary.deaths.append(f"{how} {index}")


def kill_one_of(pids: Sequence[int], chance: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)


def check(clients: Clients, world: World, said: str, ended: float, summary: Summary) -> None:
    """Every client got an answer, the right one, or the reason."""
    assert not clients.wrong, clients.wrong[0]
    comparison, told = Comparison(), []
    for when, number, answer in clients.got:
        if answer.status_code == 200:
            comparison.add(answer.json()["output_ids"], world.expected[number], f"prompt {number}")
            summary.answered += 1
            continue
        assert answer.status_code == 503, answer.text
        if said in answer.text:
            told.append(when)
        else:
            assert STARTING in answer.text, f"{said!r} is not what a client was told: {answer.text}"
            summary.refused += 1
    comparison.finish()
    assert told, "no client was told why"
    summary.told += len(told)
    summary.waits.append(max(told) - ended)


@contextlib.contextmanager
def served(world: World, scratch: Path) -> Iterator[tuple[Served, Path]]:
    """A server with a folder for temporary files of its own, of which nothing is left, nor of its processes."""
    temporary, drills, shared = scratch / "tmp", scratch / "drills", set(SHARED_MEMORY.glob("pegboard-*"))
    for folder in (temporary, drills):
        folder.mkdir(parents=True)
    paths = os.pathsep.join([str(DRILLS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": paths}
    with serving(world.config(drills), env=environment) as server:
        yield server, drills
        assert len(list(temporary.glob("pegboard-ranks-*"))) == 0, "a meeting place is left"
        running = psutil.Process(server.process.pid).children(recursive=True)
    _, left = psutil.wait_procs(running, PATIENCE)
    assert not left, f"{left} go on after the server's end"
    assert not list(temporary.iterdir()), "files are left"
    assert set(SHARED_MEMORY.glob("pegboard-*")) <= shared, "shared memory is left"


def run(
    world: World, scratch: Path, deaths: Sequence[tuple[str, int, bool]], tell: Callable[[str], object] = str
) -> Summary:
    """End ranks so, one after the other: how, which, and whether those that start are killed, too. `tell` hears what
    has happened so far.
    """
    summary = Summary()
    for number in range(0, len(deaths), DEATHS_EACH):
        with served(world, scratch / str(number)) as (server, drills):
            for how, index, twice in deaths[number : number + DEATHS_EACH]:
                death(server, world, drills, how, index, twice, summary)
        tell(str(summary))
    return summary


def drawn(count: int, tensor: int, seed: int) -> list[tuple[str, int, bool]]:
    """Return so many deaths, each kind and each rank equally often. The last one of a server is followed by another
    while ranks start.
    """
    kinds = [(how, index) for how in HOW for index in range(tensor)]
    random.Random(seed).shuffle(kinds)
    return [(*kinds[number % len(kinds)], number % DEATHS_EACH == DEATHS_EACH - 1) for number in range(count)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=40)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        world = make_world(Path(scratch), args.tensor)
        deaths = drawn(args.deaths, args.tensor, args.seed)
        run(world, Path(scratch, "servers"), deaths, lambda text: print(text, flush=True))  # noqa: T201


if __name__ == "__main__":
    main()
