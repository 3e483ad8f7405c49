"""Contended cores slow it down, never wrongly: more threads than cores, two engines at once, and others that want the
same cores; every answer is that of a single thread on its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.plugins.cpu_native import instruction_sets  # noqa: F401 - skips this file where nothing can be compiled

MANY = 2 * len(os.sched_getaffinity(0))

Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoints"),
        "llama",
        hidden_size=192,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
    )


def engine(checkpoint: Path, threads: int) -> Engine:
    return Engine.from_config(
        {
            "model": {"path": str(checkpoint), "dtype": "bfloat16", "device": "cpu"},
            "memory": {"max_total_tokens": 2048},
            "scheduler": {"chunked_prefill_size": 64},
            "runner": {"use": "cpu_native", "threads": threads},
            "log_level": "error",
        }
    )


def answers(engine: Engine, seed: int) -> Answers:
    """Of a batch of long and short prompts, greedy and drawn: tokens and their logprobs."""
    draw = np.random.default_rng(seed)
    requests = [
        GenerateRequest(
            prompt=draw.integers(3, 300, size=n).tolist(),
            sampling=SamplingParams(temperature=temperature, seed=n, max_new_tokens=24, ignore_eos=True),
            logprobs=0,
        )
        for n in (150, 33, 5, 1, 90)
        for temperature in (0.0, 0.8)
    ]
    return [(one.token_ids, [value for value, _, _ in one.logprobs]) for one in engine.run(requests)]  # type: ignore[union-attr]


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process per core that never waits."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(MANY // 2)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
        for one in others:
            one.wait()


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.full)])
def test_answers_are_those_of_one_thread(checkpoint: Path, busy: bool) -> None:
    seeds = (1, 2)
    with engine(checkpoint, 1) as alone:
        expected = [answers(alone, seed) for seed in seeds]
    with ExitStack() as stack, ThreadPoolExecutor(len(seeds)) as pool:
        if busy:
            stack.enter_context(busy_cores())
        engines = [stack.enter_context(engine(checkpoint, MANY)) for _ in seeds]
        found = list(pool.map(answers, engines, seeds))
    for seed, ours, theirs in zip(seeds, found, expected, strict=True):
        assert ours == theirs, f"prompts of seed {seed}"
