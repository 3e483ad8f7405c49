"""What a prefill and a decode server bring together, beside one server that does all: the demo model in bf16.

    python -m benchmarks.pairs                  # medians of 10, and three minutes of streams
    python -m benchmarks.pairs --quick          # to see that it works; figures mean little

Four rows. The time to the first token of one prompt on idle servers, where each of the pair may use all cores. The
gaps between tokens of 8 streams while long prompts come, the pair with a core each against one server on both, with the
prompts' time to the first token and the tokens per second of each set-up. The bytes that travel when decode has three
quarters of a prompt. All servers run all the time, and what is compared takes turns; there is no router: this program
posts each request to both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pegboard.conformance.servers import serving
from pegboard.tools.bench.report import machine

MODEL = "demo:smollm2-135m-instruct"
STREAMS = 8
EVERY = 2.0
"""Seconds between two long prompts."""
ROOMS = itertools.count(1)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=30.0, help="of streams, in each of three turns")
    parser.add_argument(
        "--only", choices=["idle", "streams", "cached"], nargs="+", default=["idle", "streams", "cached"]
    )
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(words)
    if args.quick:
        args.runs, args.tokens, args.seconds = 2, 256, 4.0
    return args


@dataclass
class Setup:
    """A server that answers, and one that computes prompts for it at this bootstrap port, if there is one."""

    answering: str
    computing: str = ""
    port: int = 0
    client: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=120))

    async def tokens(self, prompt: list[int], count: int) -> AsyncGenerator[float, None]:
        """Yield the times at which tokens come."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        first = None
        if self.computing:
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(ROOMS)}
            body |= room
            first = asyncio.ensure_future(
                self.client.post(f"{self.computing}/generate", json={**body, "stream": False})
            )
        async with self.client.stream("POST", f"{self.answering}/generate", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()
        if first is not None:
            assert (await first).status_code == 200

    async def first_token(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        start = time.perf_counter()
        times = [one async for one in self.tokens(prompt, 2)]
        return times[0] - start

    async def stats(self) -> dict[str, Any]:
        return dict((await self.client.get(f"{self.answering}/server_info")).json()["scheduler"])


def config(threads: int, gate: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "model": {"path": MODEL},
        "memory": {"max_total_tokens": 40_000, "page_size": 16},
        "runner": {"use": "cpu_native", "threads": threads},
        "scheduler": {"chunked_prefill_size": 512},
        "gates": [] if gate is None else [dict(gate)],
        "log_level": "warning",
    }


@contextlib.contextmanager
def server(config: Mapping[str, Any], cores: set[int]) -> Iterator[str]:
    """Serve on these cores alone."""
    before = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, cores)
        try:
            served = stack.enter_context(serving(config, env={**os.environ, "OMP_NUM_THREADS": str(len(cores))}))
        finally:
            os.sched_setaffinity(0, before)
        yield served.address


@contextlib.contextmanager
def pair(prefill: set[int], decode: set[int]) -> Iterator[Setup]:
    """Serve as a pair, each on its cores."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    gates = [{"use": "disagg", "role": "prefill", "listen": f"127.0.0.1:{port}"}, {"use": "disagg", "role": "decode"}]
    with (
        server(config(len(prefill), gates[0]), prefill) as computing,
        server(config(len(decode), gates[1]), decode) as answering,
    ):
        yield Setup(answering, computing, port)


class Prompts:
    """Prompts of random tokens, none like another."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def new(self, length: int) -> list[int]:
        return [int(token) for token in self._random.integers(100, 40_000, length)]


async def idle(setups: Mapping[str, Setup], prompts: Prompts, args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the time to the first token of one prompt at a time."""
    rows: dict[str, list[float]] = {name: [] for name in setups}
    for number in range(args.runs + 1):
        prompt = prompts.new(args.tokens)
        for name, setup in setups.items():
            seconds = await setup.first_token(prompt)
            if number:
                rows[name].append(seconds)
    return rows


async def streams(setup: Setup, prompts: Prompts, args: argparse.Namespace) -> dict[str, float]:
    """Measure 8 streams while long prompts come."""
    stop = time.perf_counter() + args.seconds
    gaps: list[float] = []
    waits: list[float] = []
    count = 0

    async def flow() -> None:
        nonlocal count
        while time.perf_counter() < stop:
            before = None
            async with contextlib.aclosing(setup.tokens(prompts.new(32), 200)) as times:
                async for now in times:
                    count += 1
                    if before is not None:
                        gaps.append(now - before)
                    before = now
                    if now > stop:
                        break

    async def long() -> None:
        start = time.perf_counter()
        times = [one async for one in setup.tokens(prompts.new(2000), 8)]
        waits.append(times[0] - start)

    tasks = [asyncio.ensure_future(flow()) for _ in range(STREAMS)]
    await asyncio.sleep(1.0)
    while time.perf_counter() < stop - EVERY:
        tasks.append(asyncio.ensure_future(long()))
        await asyncio.sleep(EVERY)
    await asyncio.gather(*tasks)
    return {
        "gap_p50": float(np.percentile(gaps, 50)),
        "gap_p99": float(np.percentile(gaps, 99)),
        "gap_max": max(gaps),
        "ttft_p50": statistics.median(waits),
        "tokens_per_s": count / args.seconds,
    }


async def cached(setup: Setup, prompts: Prompts, args: argparse.Namespace) -> float:
    """Return which share of a prompt's bytes travels when decode has three quarters of it."""

    async def moved(prompt: list[int]) -> float:
        before = (await setup.stats())["gate_stats"]["disagg"]["bytes_read_total"]
        await setup.first_token(prompt)
        return float((await setup.stats())["gate_stats"]["disagg"]["bytes_read_total"] - before)

    length = args.tokens // 64 * 64
    prompt = prompts.new(length)
    await moved(prompt[: length * 3 // 4])
    part = await moved(prompt)
    return part / await moved(prompts.new(length))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


async def measured(free: Setup, pinned: Setup, one: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and close the connections."""
    async with free.client, pinned.client, one.client:
        return await measure(free, pinned, one, args)


async def measure(free: Setup, pinned: Setup, one: Setup, args: argparse.Namespace) -> dict[str, Any]:
    prompts, found = Prompts(), dict[str, Any]()
    if "idle" in args.only:
        found["idle"] = rows = await idle({"one": one, "pair": free}, prompts, args)
        ratios = [both / alone for both, alone in zip(rows["pair"], rows["one"], strict=True)]
        print(f"idle, {args.tokens} tokens: one server {statistics.median(rows['one']) * 1000:.0f} ms, "
              f"pair {statistics.median(rows['pair']) * 1000:.0f} ms, ratio {spread(ratios)}")  # fmt: skip
    if "cached" in args.only:
        found["cached"] = await cached(free, prompts, args)
        print(f"decode has 75% of a prompt: {found['cached']:.3f} of the bytes travel")
    if "streams" in args.only:
        found["streams"] = turns = []
        for _ in range(1 if args.quick else 3):
            turns.append(
                {name: await streams(setup, prompts, args) for name, setup in (("one", one), ("pair", pinned))}
            )
        for name in turns[0]["one"]:
            values = {who: [turn[who][name] for turn in turns] for who in ("one", "pair")}
            ratios = [both / alone for both, alone in zip(values["pair"], values["one"], strict=True)]
            print(
                f"8 streams, {name}: one {spread(values['one'])}, pair {spread(values['pair'])}, ratio {spread(ratios)}"
            )
    return found


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    cores = sorted(os.sched_getaffinity(0))
    print(f"{json.dumps(machine())}\n")
    every = set(cores)
    first, second = ({cores[0]}, {cores[-1]})
    with pair(every, every) as free, pair(first, second) as pinned, server(config(len(cores)), every) as alone:
        found = asyncio.run(measured(free, pinned, Setup(alone), args))
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
