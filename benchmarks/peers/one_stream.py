"""One stream against llama.cpp, both in a process of their own and without a server, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS, BF16, Q4 = "pegboard", "llama.cpp bf16", "llama.cpp Q4_1"


@dataclass(frozen=True)
class Lane:
    """One of those that take turns, and the command that measures it once."""

    name: str
    command: Sequence[str]


def lanes(
    model: Path,
    gguf_bf16: Path,
    gguf_q4: Path,
    python: Path,
    variants: Sequence[tuple[str, Sequence[str]]],
    quick: bool,
) -> list[Lane]:
    """llama.cpp with both files; ours, and ours with other settings."""
    lengths = ["32", "32", "128"] if quick else ["128", "128", "512"]
    threads = str(len(os.sched_getaffinity(0)))
    llama = [str(python), str(HERE / "in_process_llama.py")]
    ours = [sys.executable, str(HERE / "in_process_ours.py"), str(model), *lengths]
    return [
        Lane(BF16, [*llama, str(gguf_bf16), threads, *lengths]),
        Lane(Q4, [*llama, str(gguf_q4), threads, *lengths]),
        Lane(OURS, ours),
        *(Lane(name, [*ours, *overrides]) for name, overrides in variants),
    ]


def compare(
    lanes: Sequence[Lane], runs: int, say: Callable[[str], None], save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Return each lane in turn, `runs` times. One record for each: prefill, decode and whole in tokens per second."""
    found: list[dict[str, Any]] = []
    for run in range(runs):
        for lane in lanes:
            record: dict[str, Any] = {"run": run, "lane": lane.name}
            done = subprocess.run(lane.command, capture_output=True, text=True, check=False)
            try:
                if done.returncode:
                    raise ValueError(f"exit code {done.returncode}")
                record |= json.loads(done.stdout.splitlines()[-1])
                said = f"prefill {record['prefill']:.0f}, decode {record['decode']:.1f} tok/s"
            except (ValueError, LookupError) as error:
                last = " | ".join(done.stderr.splitlines()[-5:])
                said = record["error"] = f"{error}: {last}"
            say(f"-- run {run + 1} of {runs}: {lane.name}: {said}")
            found.append(record)
            save(found)
    return found
