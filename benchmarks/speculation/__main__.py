"""What speculative decoding brings, and what it costs, with the demo model on this machine.

    python -m benchmarks.speculation [ngram verify ...] [--streams 1 8 32] [--runs 5] [--json FILE]
    python -m benchmarks.speculation eagle --draft DIR  # with a head for the demo model
    python -m benchmarks.speculation vllm [--draft DIR]  # beside vLLM, once `python -m benchmarks.peers setup` has run
    python -m benchmarks.speculation --quick            # to see that it works; figures mean little

ngram: output tokens per second with n-grams beside none, on prompts that quote and on free text; `adaptive` decides.
verify: seconds of a pass that verifies so many nodes of one request, beside a decode step, at 200 tokens of context.
eagle: output tokens per second of one request with a head, as a chain of 3 and as a tree of 8 nodes, beside none; and
    those with the same head where its drafts are replaced by right and wrong tokens, at several rates; and those of
    many requests, for none of which the head drafts, though it has to keep up.
vllm: the same of one request at a time in vLLM and here, with n-grams, or with a head that both load.

What is compared takes turns within one run. Ratios are medians over the runs' own, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speculation import peer
from benchmarks.speculation.engines import NONE, Run, chat, engines, run
from benchmarks.speculation.informed import InformedEagle
from benchmarks.speculation.prompts import FREE, QUOTING
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.tools.bench.report import machine

CONTEXT = 200
"""Tokens before a pass that is measured."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure: n-grams, verifying and a head unless given"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--draft", metavar="DIR", help="an EAGLE head of the demo model")
    parser.add_argument("--tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--quick", action="store_true", help="few and short runs, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(words)
    if "eagle" in args.parts and args.draft is None:
        parser.error("eagle needs --draft, the directory of a head for the demo model")
    if args.quick:
        args.streams, args.runs, args.tokens = [1, 2], 1, 16
    return args


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ngram(args: argparse.Namespace) -> dict[str, Any]:
    """Each text at each number of streams, without drafts and with those of n-grams."""
    found: dict[str, Any] = {}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=args.tokens)
    both = {"none": NONE, "ngram": {"use": "ngram", "max_batch": 64}}
    with engines(both, scheduler={"max_running_requests": 64}) as made:
        for kind, texts in (("quoting", QUOTING), ("free", FREE)):
            for streams in args.streams:
                rounds = max(1, streams // len(texts))
                asked = [f"{text}\n(Question {number}.)" for number in range(rounds) for text in texts]
                prompts = [chat(made["none"], text) for text in (asked[:2] if args.quick else asked)]
                runs: dict[str, list[Run]] = {name: [] for name in made}
                for number in range(args.runs + 1):
                    for name in sorted(made, reverse=bool(number % 2)):
                        runs[name].append(run(made[name], prompts, streams, sampling))
                found[f"{kind}, {streams}"] = compared(runs)
    return found


def compared(runs: dict[str, list[Run]], name: str = "ngram") -> dict[str, Any]:
    """Figures of runs in turns, but for the first, which warms up."""
    plain, drafted = runs["none"][1:], runs[name][1:]
    counted = {key: sum(one.stats[key] for one in drafted) for key in drafted[0].stats}
    same = [
        float(np.mean([a.token_ids == b.token_ids for a, b in zip(one.outputs, other.outputs, strict=True)]))
        for one, other in zip(plain, drafted, strict=True)
    ]
    return {
        "ratio": spread([b.rate / a.rate for a, b in zip(plain, drafted, strict=True)]),
        "plain": statistics.median(one.rate for one in plain),
        "drafted": statistics.median(one.rate for one in drafted),
        "accept_length": accept_length(counted),
        "accept_rate": counted["accepted_tokens"] / max(1, counted["drafted_tokens"]),
        "same_answers": statistics.mean(same),
    }


def verify(args: argparse.Namespace) -> dict[str, Any]:
    """Measure passes over chains that are all wrong, so that contexts are those of plain decoding."""
    configs: dict[str, Any] = {"none": NONE}
    configs |= {f"{nodes}": {"use": "wrong", "nodes": nodes, "adaptive": False} for nodes in (2, 4, 8)}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=min(args.tokens, 48), ignore_eos=True)
    with engines(configs) as made:
        random = np.random.default_rng(0)
        prompt = random.integers(100, made["none"].info.vocab_size, CONTEXT - 24).tolist()
        steps: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(3 * args.runs + 1):
            for name, engine in made.items():
                engine.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=1))
                before = engine.stats()
                engine.generate([prompt], sampling)
                after = engine.stats()
                took = after["forward_time"] - before["forward_time"]
                steps[name].append(took / (after["decode_steps"] - before["decode_steps"] + 1))
    plain = steps.pop("none")[1:]
    ratios = {
        f"{name} nodes": spread([b / a for a, b in zip(plain, those[1:], strict=True)]) for name, those in steps.items()
    }
    return {"decode_ms": statistics.median(plain) * 1000, **ratios}


def eagle(args: argparse.Namespace) -> dict[str, Any]:
    """Answer one request at a time without drafts, with a head, and with one that is told what to draft; then many at
    once, none of which gets drafts.
    """
    sampling = SamplingParams(temperature=0.0, max_new_tokens=args.tokens)
    head = {"use": "eagle", "draft": args.draft, "adaptive": False}
    configs: dict[str, Any] = {
        "none": NONE,
        "chain of 3": {**head, "steps": 3},
        "tree of 8": {**head, "steps": 3, "topk": 3, "num_draft_tokens": 8},
    }
    for rate in (0.0, 0.5, 1.0) if args.quick else (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        configs[f"told, {rate:g}"] = {**head, "use": "informed", "steps": 3, "hit_rate": rate}
    runs: dict[str, list[Run]] = {name: [] for name in configs}
    with engines({**configs, "watching": {**head, "max_batch": 1}}, memory={"max_total_tokens": 8192}) as made:
        prompts = [chat(made["none"], text) for text in (FREE[:2] if args.quick else FREE)]
        for number in range(args.runs + 1):
            for name in sorted(configs, reverse=bool(number % 2)) if number else configs:
                runs[name].append(run(made[name], prompts, 1, sampling))
                if not InformedEagle.answers:
                    pairs = zip(prompts, runs[name][0].outputs, strict=True)
                    InformedEagle.answers[:] = [(*prompt, *output.token_ids) for prompt, output in pairs]
        many = [prompt for prompt in prompts for _ in range(4)]
        watched: dict[str, list[Run]] = {"none": [], "watching": []}
        for number in range(args.runs + 1):
            for name in sorted(watched, reverse=bool(number % 2)):
                watched[name].append(run(made[name], many, len(many), sampling))
        visits = [run(made["chain of 3"], prompts, 1, sampling, keep=bool(again)) for again in (0, 1)]
    found = {name: compared(runs, name) for name in configs if name != "none"}
    return {
        **found,
        f"none, beside {len(many)}": compared(watched, "watching"),
        "break_even": break_even(found),
        "visits": [accept_length(one.stats) for one in visits],
    }


def accept_length(stats: Mapping[str, float]) -> float:
    """Return the tokens that a pass with drafts gains, the last one included."""
    return 1 + stats["accepted_tokens"] / max(1, stats["drafted_requests"])


def break_even(found: dict[str, Any]) -> float:
    """Return the accept length at which drafts of a chain of 3 would take as long as none: on the straight line through
    the points at which the head was told what to draft.
    """
    points = [(one["accept_length"], one["ratio"]["median"]) for name, one in found.items() if name.startswith("told")]
    slope, height = statistics.linear_regression(*zip(*points, strict=True))
    return (1 - height) / slope


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Compare with vLLM."""
    return peer.compare(peer.texts(args.quick), args.draft, args.runs, args.tokens)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "ngram": ngram,
    "verify": verify,
    "eagle": eagle,
    "vllm": vllm,
}


def table(name: str, found: dict[str, Any]) -> str:
    """Return the figures of a part as a table in Markdown."""
    if name == "vllm":
        return peer.table(found)
    if name == "verify":
        lines = ["| nodes | times a decode step |", "|---|---|"]
        lines += [f"| {key} | {_ratio(value)} |" for key, value in found.items() if isinstance(value, dict)]
        return "\n".join([*lines, "", f"A decode step: {found['decode_ms']:.2f} ms"])
    first = "drafts" if name == "eagle" else "text, streams"
    lines = [f"| {first} | ratio | tokens/s without | with | accept length | accept rate | same answers |"]
    lines += ["|---" * 7 + "|"]
    lines += [
        f"| {key} | {_ratio(one['ratio'])} | {one['plain']:.0f} | {one['drafted']:.0f} | {one['accept_length']:.2f} "
        f"| {one['accept_rate']:.2f} | {one['same_answers']:.0%} |"
        for key, one in found.items()
        if isinstance(one, dict)
    ]
    if "break_even" in found:
        lines += ["", f"A chain of 3 would break even at an accept length of {found['break_even']:.2f}"]
        first, again = found["visits"]
        lines += [f"Accept length of prompts seen for the first time {first:.3f}, and again {again:.3f}"]
    return "\n".join(lines)


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['min']:.2f} to {found['max']:.2f})"


def main() -> None:
    args = arguments()
    found: dict[str, Any] = {"machine": machine()}
    for name in args.parts or ("ngram", "verify", *(("eagle",) if args.draft else ())):
        found[name] = PARTS[name](args)
        print(f"{name}\n\n{table(name, found[name])}\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
