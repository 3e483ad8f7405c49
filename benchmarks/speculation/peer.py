"""vLLM beside Pegboard: each with drafts and without, on the same prompts, one request at a time, in turns."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import servers
from benchmarks.peers.environments import vllm_environment
from benchmarks.speculation.engines import NONE, chat, engines, run
from benchmarks.speculation.prompts import FREE, QUOTING
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.system.cache_dir import default_cache_dir

CONTEXT = 2048
NGRAM: Mapping[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_max": 8,
    "prompt_lookup_min": 2,
}
"""As ours: matches of 2 to 8 tokens, and 8 nodes."""


class Vllm:
    """A process of vLLM with one setting."""

    def __init__(self, cache: Path, model: Path, speculation: Mapping[str, Any] | None) -> None:
        python = vllm_environment(cache).python
        script = Path(__file__).with_name("in_vllm.py")
        command = [str(python), str(script), str(model), json.dumps(speculation), str(CONTEXT)]
        environment = {**os.environ, **servers.vllm_variables(cache)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._read("ready")

    def _read(self, word: str) -> str:
        """Return the rest of the next line that begins with a word."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"vLLM ended with {self._process.wait()}; run benchmarks/speculation/in_vllm.py by hand")

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, tokens]) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read("found"))
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def vllms(cache: Path, model: Path, settings: Mapping[str, Mapping[str, Any] | None]) -> Iterator[dict[str, Vllm]]:
    """One process for each setting, by name."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name, speculation in settings.items():
            made[name] = Vllm(cache, model, speculation)
            stack.callback(made[name].close)
        yield made


def compare(texts: Mapping[str, Sequence[str]], draft: str | None, runs: int, tokens: int) -> dict[str, Any]:
    """Return, for each kind of text, each engine's rates and ratios to its own plain decoding. `draft` is a head for
    the demo model, which both load; None compares n-grams.
    """
    cache = default_cache_dir() / "peers"
    model = cache / "model" / "smollm2-bf16"
    if not vllm_environment(cache).ready or not model.is_dir():
        raise SystemExit("vLLM is not installed; run python -m benchmarks.peers setup --peers vllm")
    ours: dict[str, Any] = {"use": "ngram", "max_batch": 64}
    theirs: dict[str, Any] = dict(NGRAM)
    if draft is not None:
        ours = {"use": "eagle", "draft": draft, "steps": 3, "adaptive": False}
        theirs = {"method": "eagle3", "model": draft, "num_speculative_tokens": 3}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens)
    found: dict[str, Any] = {}
    with (
        engines({"plain": NONE, "drafts": ours}, model={"path": str(model), "dtype": "bfloat16"}) as mine,
        vllms(cache, model, {"plain": None, "drafts": theirs}) as peers,
    ):
        for kind, asked in texts.items():
            prompts = [chat(mine["plain"], text) for text in asked]
            rates: dict[str, list[float]] = {f"{who} {how}": [] for who in ("ours", "vllm") for how in mine}
            lengths: dict[str, list[float]] = {"ours": [], "vllm": []}
            for number in range(runs + 1):
                for how in sorted(mine, reverse=bool(number % 2)):
                    one = run(mine[how], prompts, 1, sampling)
                    other = peers[how].run(prompts, tokens)
                    rates[f"ours {how}"].append(one.rate)
                    rates[f"vllm {how}"].append(sum(map(len, other["answers"])) / other["seconds"])
                    if how == "drafts":
                        drafted = max(1, one.stats["drafted_requests"])
                        lengths["ours"].append(1 + one.stats["accepted_tokens"] / drafted)
                        lengths["vllm"].append(1 + other.get("accepted", 0) / max(1, other.get("drafts", 0)))
            found[kind] = summary(rates, lengths)
    return found


def summary(rates: dict[str, list[float]], lengths: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians but for the first run, which warms up."""
    found: dict[str, Any] = {}
    for who in ("ours", "vllm"):
        plain, drafts = rates[f"{who} plain"][1:], rates[f"{who} drafts"][1:]
        found[who] = {
            "plain": statistics.median(plain),
            "drafts": statistics.median(drafts),
            "ratio": statistics.median(b / a for a, b in zip(plain, drafts, strict=True)),
            "accept_length": statistics.median(lengths[who][1:]),
        }
    return found


def texts(quick: bool) -> dict[str, Sequence[str]]:
    return {"quoting": QUOTING[:2] if quick else QUOTING, "free": FREE[:2] if quick else FREE}


def table(found: dict[str, Any]) -> str:
    lines = ["| text | engine | plain, tokens/s | with drafts | ratio | accept length |", "|---" * 6 + "|"]
    for kind, engines_found in found.items():
        lines += [
            f"| {kind} | {who} | {one['plain']:.0f} | {one['drafts']:.0f} | {one['ratio']:.2f} "
            f"| {one['accept_length']:.2f} |"
            for who, one in engines_found.items()
        ]
    return "\n".join(lines)
