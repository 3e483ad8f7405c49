"""What constrained decoding costs: the share of a decode step that goes into masks, and how long grammars compile.

    python benchmarks/grammar.py [--backend llguidance] [--backend xgrammar] [--streams 16] [--tokens 96]

One run of the engine per backend with as many streams, each with a schema of its own, the same number of tokens each.
The masks' time is measured where it is spent, within the run: finding out what may come next and going on by a token
(`plugins/grammar/state.py`), putting the batch's mask together, and applying it to the logits. Its share is of
the decode steps of the same run, so the machine's speed and its other users cancel out. Beside it stands the time
of a step without any grammar. No tokens are skipped ahead. Compilation is timed in this process, without the helper.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.toolkit.grammars.grammar import grammar_of

PROMPT = "A list of people as JSON, as long as possible:\n"


def schema(number: int) -> dict[str, Any]:
    """Return a list of records that no answer of the benchmark's length finishes; each stream's is another grammar."""
    person = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "minLength": 3, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "pattern": "^[a-z0-9._]{1,20}@[a-z0-9]{1,20}[.](com|org|net)$"},
            "role": {"enum": ["admin", "user", "guest"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 3, "maxItems": 9},
        },
        "required": [f"name_{number}", "age", "email", "role", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 40, "maxItems": 60}


class Clock:
    """Adds up the time that functions take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running = False
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Time every call of ``owner.name`` that is not part of another one, under `what`, until `restore`."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.running:
                return original(*args, **kwargs)
            self.running = True
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start
                self.running = False

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original))

    def restore(self) -> None:
        for undo in self._undo:
            undo()


def requests(streams: int, tokens: int, *, constrained: bool) -> list[GenerateRequest]:
    made = []
    for number in range(streams):
        grammar = grammar_of(json_schema=schema(number)) if constrained else None
        sampling = SamplingParams(
            max_new_tokens=tokens, temperature=1.0, seed=number, grammar=grammar, ignore_eos=not constrained
        )
        made.append(GenerateRequest(prompt=PROMPT, sampling=sampling))
    return made


def run(backend: str, model: str, loop: str, streams: int, tokens: int) -> None:
    from pegboard.core.pipeline import sampling_info
    from pegboard.plugins.grammar import constraint as grammar
    from pegboard.toolkit.sampling import sample

    config = {
        "model": {"path": model},
        "grammar": {"use": backend, "compile_timeout": 60, "jump_ahead": 0},
        "scheduler": {"loop": loop},
        "log_level": "error",
    }
    with Engine.from_config(config) as engine:
        engine.run(requests(streams, 4, constrained=True))  # compiles, and warms up
        free = timed_run(engine, requests(streams, tokens, constrained=False))
        clock = Clock()
        clock.watch(grammar, "advance", "going on")
        clock.watch(grammar, "look_ahead", "what may come next")
        clock.watch(sampling_info, "mask_of", "putting masks together")
        clock.watch(sample, "apply_token_mask", "applying them")
        bound = timed_run(engine, requests(streams, tokens, constrained=True))
        clock.restore()
    total = sum(clock.seconds.values())
    print(f"{backend}, loop {loop}: {streams} streams of {tokens} tokens")
    print(f"  step without grammars {free * 1e3:8.2f} ms")
    print(f"  step with grammars    {bound * 1e3:8.2f} ms")
    for what, seconds in clock.seconds.items():
        print(f"    {what:24s} {seconds / tokens * 1e3:8.3f} ms  {seconds / tokens / bound:6.2%}")
    print(f"  masks' share of a step {total / tokens / bound:7.2%}")


def timed_run(engine: Engine, made: list[GenerateRequest]) -> float:
    """Measure seconds per token and stream, prompts excluded: their prefix is cached."""
    start = time.perf_counter()
    outputs = engine.run(made)
    took = time.perf_counter() - start
    for output in outputs:
        assert output.finish_reason["type"] in ("length", "stop"), output.finish_reason
    return took / statistics.mean(len(output.token_ids) for output in outputs)


def compile_times(backend: str, model: str) -> None:
    """How long the two hundred schemas of the tests take, in this process."""
    from pathlib import Path

    from pegboard.core.config.compose import compose
    from pegboard.core.config.select import Selection
    from pegboard.core.engine.source import prepare_model
    from pegboard.core.interfaces.errors import InvalidRequest
    from pegboard.plugins.grammar import GRAMMAR
    from pegboard.plugins.grammar.api import GrammarContext
    from tests.e2e.schemas import corpus

    resolved = compose((), data={"model": {"path": model}, "grammar": {"use": backend}})
    selection = Selection(resolved)
    prepared = prepare_model(resolved, selection)
    tokenizer = prepared.tokenizer
    ctx = GrammarContext(Path(prepared.directory), tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    made = selection.choose(GRAMMAR, ctx).build(ctx)
    times, sizes, refused = [], [], 0
    for _, one in corpus():
        grammar = grammar_of(json_schema=one)
        assert isinstance(grammar, Grammar)
        start = time.perf_counter()
        try:
            compiled = made.compile(grammar)
        except InvalidRequest:
            refused += 1
            continue
        times.append(time.perf_counter() - start)
        sizes.append(made.load(grammar, compiled).size_bytes)
    times.sort()
    share = [times[int(len(times) * q)] * 1e3 for q in (0.5, 0.9, 0.99)]
    print(f"{backend}: compiling {len(times)} schemas, {refused} refused")
    print(f"  median {share[0]:.1f} ms, 90% {share[1]:.1f} ms, 99% {share[2]:.1f} ms, longest {times[-1] * 1e3:.0f} ms")
    print(f"  memory of one, median {statistics.median(sizes) / 1024:.0f} KiB, largest {max(sizes) / 1024:.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="which backends; default: llguidance and xgrammar")
    parser.add_argument("--model", default="demo:smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--loop", default="normal", choices=("normal", "overlap"))
    args = parser.parse_args()
    for backend in args.backend or ["llguidance", "xgrammar"]:
        run(backend, args.model, args.loop, args.streams, args.tokens)
        compile_times(backend, args.model)


if __name__ == "__main__":
    main()
