"""How much memory the two processes take, and that it does not grow with the requests they served."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from pegboard.core.engine.engine import Engine
from pegboard.core.frontend.outputs import OutputState
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams

MB = 2**20
REQUESTS = 500
WINDOW = 50
AT_ONCE = 8
GROWTH = 3 * MB
"""What may come on top between the early and the late requests, some 300 of them: 10 kB for each. Measured: 0.1 to
0.4 MB in either process, which ends after some thousands (arenas of the allocator, tables of compiled regular
expressions, oneDNN's kernels by shape). A response, a connection or a batch that stays would show as more; a request
alone is smaller than that, so `test_nothing_is_kept_of_a_request` counts objects instead of bytes."""

WEIGHTS = 134_515_008 * 4
TOKENS = 4096
KV_POOL = TOKENS * 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in float32: parameters; tokens x layers x (keys, values) x heads x head size."""


def resident(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def mapped(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text("utf-8")


def processes(server: Served) -> tuple[psutil.Process, psutil.Process]:
    """API process and scheduler process."""
    api = psutil.Process(server.process.pid)
    (scheduler,) = [child for child in api.children() if "scheduler_process" in " ".join(child.cmdline())]
    return api, scheduler


def request(i: int) -> tuple[str, dict[str, Any]]:
    """The i-th of mixed requests: chat and native, streamed and not, with prompts that share little."""
    words = " ".join(f"{(i * 7919 + k * 104729) % 9973}" for k in range(10 + i % 40))
    if i % 2:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": 8, "temperature": 0}
        return "/v1/chat/completions", {**body, "stream": i % 4 == 1}
    return "/generate", {"text": words, "stream": i % 4 == 0, "sampling_params": {"max_new_tokens": 8}}


async def serve_one(client: httpx.AsyncClient, i: int) -> None:
    path, body = request(i)
    if i % 10 in (0, 5):  # leaves before the answer is complete
        body |= {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "max_tokens": 200, "ignore_eos": True}
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                return
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def serve_all(server: Served, n: int) -> list[tuple[int, int]]:
    """Resident bytes of both processes after every batch of requests."""
    api, scheduler = processes(server)
    seen = []
    async with httpx.AsyncClient(base_url=server.address, timeout=120) as client:
        for start in range(0, n, AT_ONCE):
            await asyncio.gather(*(serve_one(client, i) for i in range(start, min(n, start + AT_ONCE))))
            seen.append((resident(api), resident(scheduler)))
    return seen


@pytest.mark.slow
def test_flat_over_five_hundred_requests(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    # A pool that is soon full, so that its own pages do not count as growth.
    config = {"model": {"path": str(model)}, "attention": {"use": "torch"}, "memory": {"max_total_tokens": 2048}}
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        seen = asyncio.run(serve_all(server, REQUESTS))
        api, _ = processes(server)
        assert "torch" not in mapped(api), "the API process must not load torch"
        counters = httpx.get(f"{server.address}/server_info").json()["scheduler"]
    per_window = WINDOW // AT_ONCE
    for name, values in zip(("API process", "scheduler process"), zip(*seen, strict=True), strict=True):
        early = statistics.median(values[2 * per_window : 4 * per_window])
        late = statistics.median(values[-2 * per_window :])
        assert late - early < GROWTH, f"the {name} grew from {early / MB:.0f} to {late / MB:.0f} MB"
    assert counters["book_errors"] == counters["failed_batches"] == 0


@pytest.mark.full
@pytest.mark.slow
def test_demo_model_stays_within_its_bounds() -> None:
    config = {
        "model": {"path": "demo:smollm2-135m-instruct", "dtype": "float32"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": TOKENS},
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        seen = asyncio.run(serve_all(server, 24))
        api, _ = processes(server)
        assert "torch" not in mapped(api)
    assert max(value for value, _ in seen) < 200 * MB
    assert max(value for _, value in seen) < WEIGHTS + KV_POOL + 800 * MB


def test_nothing_is_kept_of_a_request(tmp_path: Path) -> None:
    """In the scheduler: each lot of requests, the last of them aborted, leaves no more objects than the one before."""
    model = tiny_checkpoint(tmp_path, "llama")
    config = {"model": {"path": str(model)}, "attention": {"use": "torch"}, "memory": {"max_total_tokens": 512}}
    requests, objects = [], []
    with Engine.from_config(config) as engine:
        for lot in range(5):
            prompts = [[(7 * i + 13 * lot + k) % 300 for k in range(10 + i)] for i in range(40)]
            engine.generate(prompts, SamplingParams(max_new_tokens=4))
            stream = engine.stream(prompts[lot], SamplingParams(max_new_tokens=100, ignore_eos=True))
            next(stream)
            del stream
            engine.flush_cache()
            gc.collect()
            found = gc.get_objects()
            requests.append(sum(type(one) in (Req, OutputState) for one in found))
            objects.append(len(found))
            del found
    assert requests[0] == requests[-1], f"requests after each lot: {requests}"
    # A lot is 41 requests: anything that each of them left would be counted at least so often.
    assert objects[-1] - objects[-2] < 41, f"objects after each lot: {objects}"
