"""The engine on a GPU, end to end, in about a minute.

    python -m benchmarks.gpu.smoke [--device cpu] [--only PATTERN]

One line per check; the exit status is 1 if any fails. Weights are loaded to the device, memory is sized by trial,
graphs are recorded, both loops run, requests are cut in chunks, mixed, retracted, drafted for and moved to the host.
Models are in float32, so that greedy tokens must agree with transformers on the same device, and answers with each
other, whichever way they are computed.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pegboard
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.sampling import SamplingParams

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}
LENGTHS = (1, 2, 5, 17, 63, 64, 65, 130, 300, 700)
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=7, max_new_tokens=TOKENS, ignore_eos=True)

Tokens = list[list[int]]
Sections = dict[str, dict[str, Any]]


def prompts() -> Tokens:
    """Return random prompts of all lengths; every second one repeats itself, which drafts and caches see."""
    torch.manual_seed(1)
    found = [torch.randint(3, 300, (length,)).tolist() for length in LENGTHS]
    return [
        (prompt[: len(prompt) // 3 + 1] * 3)[: len(prompt)] if at % 2 else prompt for at, prompt in enumerate(found)
    ]


PROMPTS = prompts()


def kinds(graphs: str) -> dict[str, Sections]:
    """Return the ways of computing that must give the same tokens, each as sections of the config."""
    layered = {"use": "layered", "graphs": graphs}
    return {
        "graphs": {"runner": layered, "scheduler": {"loop": "normal"}},
        "eager": {"runner": {"use": "layered", "graphs": "off"}, "scheduler": {"loop": "normal"}},
        "overlap": {"runner": layered, "scheduler": {"loop": "overlap"}},
        "prefills called": {"runner": {**layered, "prefill_graph_sizes": []}},
        "prefills replayed in chunks of 48": {"runner": layered, "scheduler": {"chunked_prefill_size": 48}},
        "prefills replayed, mixed": {
            "runner": layered,
            "scheduler": {"chunked_prefill_size": 64, "mixed_chunk": True, "loop": "overlap"},
        },
        "chunks of 48, pages of 16": {"memory": {"page_size": 16}, "scheduler": {"chunked_prefill_size": 48}},
        "mixed": {"scheduler": {"chunked_prefill_size": 64, "mixed_chunk": True}},
        "retracted": {"memory": {"max_total_tokens": 1024}},
        "drafts by n-grams": {"speculation": {"use": "ngram"}},
        "host tier": {
            "memory": {"max_total_tokens": 1024, "host": {"max_total_tokens": 8192}},
            "prefix_cache": {"use": "hiradix"},
        },
        "attention torch": {"attention": {"use": "torch"}},
    }


def answers(
    path: Path, device: str, sampling: SamplingParams, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[Tokens, dict[str, int]]:
    """Return the tokens of all prompts, asked twice, and the runner's figures."""
    config: Sections = {
        "model": {"path": str(path), "device": device, "dtype": "float32"},
        "memory": {"max_total_tokens": 8192},
        "scheduler": {"max_running_requests": 16},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    with pegboard.Engine.from_config(config) as engine:
        found = [answer.token_ids for _ in range(2) for answer in engine.generate(PROMPTS, sampling)]
        figures = dict(engine.built.runner.figures())
    del engine
    gc.collect()  # before the next engine asks what memory is free
    if device != "cpu":
        torch.cuda.empty_cache()
    return found, figures


def reference(path: Path, device: str) -> Tokens:
    """Return what transformers answers, for the prompts asked twice."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found * 2


def same(tokens: Tokens, wanted: Tokens) -> str:
    """Return nothing where all answers are alike, else which are not and from which token on."""
    wrong = [
        f"{at}@{next((place for place, pair in enumerate(zip(found, want, strict=False)) if pair[0] != pair[1]), '?')}"
        for at, (found, want) in enumerate(zip(tokens, wanted, strict=True))
        if found != want
    ]
    return f"{len(wrong)} of {len(tokens)} answers differ: {' '.join(wrong)}" if wrong else ""


class Smoke:
    """Runs checks and counts those that fail."""

    def __init__(self, device: str, only: str) -> None:
        self.device, self._only = device, only
        self.failed = 0
        self.graphs = "auto" if device == "cpu" else "on"

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Run a check, which returns what is wrong."""
        if not re.search(self._only, name):
            return
        start = time.perf_counter()
        try:
            wrong = run()
        except Exception:
            wrong = traceback.format_exc(limit=-6)
        self.failed += bool(wrong)
        print(f"{'FAIL' if wrong else 'ok  '} {name} {time.perf_counter() - start:.1f} s {wrong}", flush=True)

    def family(self, family: str, folder: Path) -> None:
        """Check one family of models."""
        path, device = tiny_checkpoint(folder, family, **SIZES), self.device
        wanted = reference(path, device)
        for name, sections in kinds(self.graphs).items():
            self.check(f"{family}: {name}", partial(self._alike, path, name, sections, wanted))
        for name in ("graphs", "overlap"):
            self.check(f"{family}: drawn alike, {name}", partial(self._drawn, path, name))
        memory: dict[str, dict[str, Any]] = {"bfloat16, memory by trial": {"max_total_tokens": None}}
        if device != "cpu":
            memory |= {f"KV in {kind}": {"kv_dtype": kind} for kind in ("fp8_e4m3", "fp8_e5m2")}
        for name, section in memory.items():
            self.check(f"{family}: {name}", partial(self._runs, path, {"memory": section}))

    def _alike(self, path: Path, name: str, sections: Sections, wanted: Tokens) -> str:
        found, figures = answers(path, self.device, GREEDY, sections)
        replays = name in ("graphs", "overlap") or name.startswith("prefills replayed")
        if replays and self.device != "cpu":
            if not figures.get("replayed_steps"):
                return f"no step was replayed: {figures}"
            if not figures.get("replayed_prefills") or figures.get("eager_prefills"):
                return f"not all prefills were replayed: {figures}"
        return same(found, wanted)

    def _drawn(self, path: Path, name: str) -> str:
        found, eager = (answers(path, self.device, DRAWN, kinds(self.graphs)[way])[0] for way in (name, "eager"))
        return same(found, eager)

    def _runs(self, path: Path, sections: Sections) -> str:
        found, _ = answers(path, self.device, GREEDY, {"model": {"dtype": "bfloat16"}, **sections})
        return "" if [len(tokens) for tokens in found] == [TOKENS] * (2 * len(PROMPTS)) else "answers are too short"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all checks; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="checks whose name matches this regular expression")
    given = parser.parse_args(arguments)
    smoke = Smoke(given.device, given.only)
    with tempfile.TemporaryDirectory() as folder:
        for family in ("llama", "qwen3"):
            smoke.family(family, Path(folder))
    sys.exit(1 if smoke.failed else 0)


if __name__ == "__main__":
    main()
