"""Kill a server amid writes to its storage, and start it again over the same folder, many times.

    python tests/faults/tiers_kill.py --rounds 30

Each round starts a server, asks it what the one before it was asked (hits must come from the storage), then lets
several clients talk to it, and kills all of its processes with SIGKILL at a random moment after it has begun to write.
Every answer is compared with that of an engine that computes everything. Files that a kill has left half written are
made to look two hours old before the next start, which is to remove them: younger ones could be another server's.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx
import psutil

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from tests.faults.tiers import NEW, Turn, World, answered, config, tiers

CLIENTS = 4
PATIENCE = 60.0
ENOUGH = 16
"""Files after which some prompt is there as a whole: blocks of one are written in a row, and it has eight to ten."""
LONGEST = 0.5
"""Seconds from then to the kill, at most."""
OLD = 2 * 3600.0


@dataclass
class Summary:
    rounds: int = 0
    requests: int = 0
    """Those that were answered."""
    cut_off: int = 0
    """Those that were under way at a kill."""
    hits: list[int] = field(default_factory=list)
    """Tokens from the storage after each restart."""
    files: int = 0
    torn: int = 0
    """Files of blocks that were shorter than others after a kill, or were damaged when a server read them."""
    temporaries: int = 0
    """Files that were half written at a kill, and gone after the next start."""

    def __str__(self) -> str:
        hits = f"{min(self.hits)} to {max(self.hits)}" if self.hits else "no"
        return (
            f"{self.rounds} kills; {self.requests} requests answered, all rightly, {self.cut_off} cut off; "
            f"{hits} tokens from the storage after each restart; {self.files} files, {self.torn} torn; "
            f"{self.temporaries} temporaries left by kills, and removed by the next start"
        )


class Clients:
    """Some that talk to a server until it is gone, each turn after turn."""

    def __init__(self, address: str, world: World, salt: str, seed: int) -> None:
        self.answered = self.cut_off = 0
        self.wrong: list[str] = []
        self.ending = False
        """Whether the server has been killed, so that what fails may fail."""
        self._address, self._talks, self._salt = address, world.talks, salt
        self._lock = threading.Lock()
        chances = [random.Random(f"{seed} {number}") for number in range(CLIENTS)]
        self._threads = [threading.Thread(target=self._talk, args=(chance,)) for chance in chances]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join()
        assert not self.wrong, self.wrong[0]

    def _talk(self, chance: random.Random) -> None:
        with httpx.Client(base_url=self._address, timeout=PATIENCE) as client:
            salt = self._salt
            while not self.ending:
                for turn in chance.choice(self._talks):
                    if not self._one(client, turn, salt):
                        return
                salt = f"{self._salt} {chance.random()}"  # so that there is always something new to write

    def _one(self, client: httpx.Client, turn: Turn, salt: str) -> bool:
        try:
            ask(client, turn, salt)
        except (httpx.HTTPError, AssertionError) as error:
            with self._lock:
                if isinstance(error, httpx.HTTPError) and self._killed():
                    self.cut_off += 1
                else:
                    self.wrong.append(repr(error))
            return False
        with self._lock:
            self.answered += 1
        return True

    def _killed(self) -> bool:
        """Return whether the kill is what a client has met; it may meet it just before that is noted."""
        until = time.monotonic() + 1
        while not self.ending and time.monotonic() < until:
            time.sleep(0.01)
        return self.ending


def ask(client: httpx.Client, turn: Turn, salt: str) -> int:
    """Ask, compare the answer, and return how many tokens of the prompt came from the storage."""
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    body = {"input_ids": turn.prompt, "sampling_params": sampling, "cache_salt": salt}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["output_ids"] == turn.answer, f"{found['output_ids']} instead of {turn.answer}"
    details = found["meta_info"]["cached_tokens_details"] or {}
    return int(details.get("storage") or 0)


def figures(client: httpx.Client) -> Mapping[str, float]:
    tiers: Mapping[str, float] = client.get("/server_info").json()["scheduler"]["tiers"]
    return tiers


def kill(server: Served) -> None:
    """End all processes of a server at once, as a machine that has no memory left might."""
    parent = psutil.Process(server.process.pid)
    everyone = [parent, *parent.children(recursive=True)]
    for one in everyone:
        one.suspend()
    for one in everyone:
        one.kill()
    psutil.wait_procs(everyone, PATIENCE)


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return files of the folder; the server may be writing and removing some."""
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names if Path(name).match(pattern)]


def temporaries(folder: Path) -> list[Path]:
    return files_in(folder, ".new-*")


def make_old(paths: Sequence[Path]) -> None:
    for path in paths:
        then = time.time() - OLD
        os.utime(path, (then, then))


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: it does not happen"
        time.sleep(0.002)


def look_back(client: httpx.Client, world: World, salts: Sequence[str]) -> tuple[int, int]:
    """Ask what was asked before the restart. Return how many requests that were, and tokens from the storage."""
    turns = [(turn, salt) for salt in salts for talk in world.talks for turn in talk[-1:]]
    return len(turns), sum(ask(client, turn, salt) for turn, salt in turns)


def one_round(number: int, world: World, folder: Path, seed: int, summary: Summary) -> None:
    chance = random.Random(f"{seed} {number}")
    # To wait for the disk makes it likely that a kill comes between a file's beginning and its end.
    sections = tiers({"use": "files", "dir": str(folder), "fsync": bool(number % 2)})
    left = temporaries(folder)
    make_old(left)
    settings = config(world.model, **sections)
    with serving(settings, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        with httpx.Client(base_url=server.address, timeout=PATIENCE) as client:
            until(lambda: not any(path.exists() for path in left), "old temporaries are removed")
            if number:
                asked, hits = look_back(client, world, [f"round {number - 1}"])
                assert hits > 0, f"round {number}: nothing comes from the storage"
                summary.hits.append(hits)
                summary.requests += asked
            before = len(files_in(folder))
            clients = Clients(server.address, world, f"round {number}", seed + number)
            until(lambda: len(files_in(folder)) >= before + ENOUGH or clients.wrong, "something is written")
            time.sleep(chance.uniform(0, LONGEST))
            summary.torn += int(figures(client)["files_damaged"])
            clients.ending = True
            kill(server)
            clients.end()
        assert "Traceback" not in server.log(), server.log()
    summary.rounds += 1
    summary.requests += clients.answered
    summary.cut_off += clients.cut_off
    sizes = [path.stat().st_size for path in files_in(folder, "[!.]*")]
    summary.files = len(sizes)
    summary.torn += sum(size < max(sizes) for size in sizes)
    summary.temporaries += len(left)


def run(world: World, folder: Path, rounds: int, seed: int = 0) -> Iterator[Summary]:
    """Kill and start; yield what has happened so far, after each kill, and once more after a last start."""
    summary = Summary()
    for number in range(rounds + 1):
        one_round(number, world, folder, seed, summary)
        yield summary
    assert summary.torn == 0, "a file is there as a whole or not at all, and yet some were torn"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="restarts after a kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_checkpoint(scratch, "llama", num_hidden_layers=2)
        with answered(model, talks=8) as world:
            for summary in run(world, Path(scratch, "kv"), args.rounds, args.seed):
                print(summary, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
