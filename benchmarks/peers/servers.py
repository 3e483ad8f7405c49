"""The servers that are compared: how each is started, with what both have in common."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.environments import find_library, vllm_environment
from benchmarks.peers.workloads import MODEL

KV_GIB = 2
"""Memory for the KV cache, as the peers are told."""
OURS_KV_TOKENS = 65536
"""For ours; a token of this model takes 23 kB, so it is 1.5 GB: less than vLLM has, more than a workload needs."""


@dataclass(frozen=True)
class Subject:
    """A server to be measured. `guess` is a request rate that it may bear; `pace` its tokens per second at 1, 8 and 32
    streams, about, from which the duration is estimated.
    """

    name: str
    guess: float
    start_s: float
    """About how long it takes to start."""
    pace: tuple[float, float, float]
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    ours: bool = True
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    """For ours: that of the checkout that is measured."""
    reads: str = ""
    """The path of a stream that a client reads all the while, as an open page does; "": none."""


BEFORE = "before"
"""The name of another checkout of Pegboard."""
VLLM = Subject("vllm", guess=4.0, start_s=75.0, pace=(32, 185, 381), ours=False)
OURS = Subject("pegboard", guess=12.0, start_s=8.0, pace=(130, 650, 1050))


def variant(text: str) -> Subject:
    """Pegboard with other settings, from NAME:KEY=VALUE,KEY=VALUE. Raises ValueError."""
    name, pairs = _named_pairs("--variant", text)
    return dataclasses.replace(OURS, name=f"{OURS.name}-{name}", overrides=pairs)


def with_reader(text: str) -> Subject:
    """Pegboard with a client that reads a stream of it, from NAME:/PATH. Raises ValueError."""
    name, _, path = text.partition(":")
    if not name or not path.startswith("/"):
        raise ValueError(f"--reading {text}: must be NAME:/PATH")
    return dataclasses.replace(OURS, name=f"{OURS.name}-{name}", reads=path)


def vllm_variant(text: str) -> Subject:
    """vLLM with other variables of its environment, from NAME:VARIABLE=VALUE,VARIABLE=VALUE. Raises ValueError."""
    name, pairs = _named_pairs("--vllm-variant", text)
    return dataclasses.replace(VLLM, name=f"{VLLM.name}-{name}", env=dict(one.split("=", 1) for one in pairs))


def _named_pairs(option: str, text: str) -> tuple[str, tuple[str, ...]]:
    name, colon, rest = text.partition(":")
    pairs = tuple(one.strip() for one in rest.split(",") if one.strip())
    if not name or not colon or not pairs or not all("=" in one for one in pairs):
        raise ValueError(f"{option}: {text!r} is not NAME:KEY=VALUE[,KEY=VALUE...]")
    return name, pairs


def ours_command(subject: Subject, model: Path, port: int, config: Path) -> list[str]:
    """`pegboard serve`, whose config is written to `config`."""
    data = {
        "model": {"path": str(model), "served_name": MODEL},
        "memory": {"max_total_tokens": OURS_KV_TOKENS},
        "server": {"host": "127.0.0.1", "port": port},
    }
    config.write_text(json.dumps(data, indent=2), "utf-8")
    sets = [word for one in subject.overrides for word in ("--set", one)]
    return [subject.python, "-m", "pegboard", "serve", str(config), *sets]


def vllm_command(subject: Subject, cache: Path, model: Path, port: int) -> list[str]:
    """`vllm serve` in bf16 with prefix caching."""
    return [
        str(vllm_environment(cache).root / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL,
        "--dtype", "bfloat16", "--enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port),
        "--disable-uvicorn-access-log", *subject.options,
    ]  # fmt: skip


def vllm_variables(cache: Path, cores: Sequence[int] | None = None) -> dict[str, str]:
    """vLLM's environment: memory, threads on every core, and the two libraries that it wants to be loaded first.

    Left to itself it keeps one core for its API and scheduler processes; with two cores that halves what computes.
    """
    root = vllm_environment(cache).root
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    preload = [str(one) for name in ("libtcmalloc", "libiomp5") if (one := find_library(root, name))]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # It calls programs of its environment, ninja for one.
        "PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    if preload:
        variables["LD_PRELOAD"] = os.pathsep.join(preload)
    return variables
