"""``pegboard bench step``: one batch of a given shape, over and over, and where a step's time goes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pegboard.core import __version__
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.tools.bench.target import token_range_of

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput

STAGES = ("plan", "prepare", "forward", "results", "outputs")
"""What is measured of a step: the plan and where its memory is; arrays to tensors; the runner, with sampling;
tokens appended and checked; text."""
PATIENCE = 8
"""Steps that may pass before one has the shape."""

StepMode = Literal["decode", "prefill", "mixed"]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The shape: `batch` requests with `context` tokens before these. In a prefill each of them computes `extend`
    more, in a decode step one; in a mixed one they decode, and one request more computes a prompt of `extend` tokens.
    """

    mode: StepMode = "decode"
    batch: int = 1
    context: int = 128
    extend: int = 512
    repetitions: int = 30
    warmup: int = 5
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps that are run, some without being measured."""
        return self.repetitions + self.warmup

    @property
    def tokens(self) -> int:
        """New tokens of one step."""
        return {"decode": self.batch, "prefill": self.batch * self.extend, "mixed": self.batch + self.extend}[self.mode]

    @property
    def new_tokens(self) -> int:
        """Of a request that decodes all the while. A mixed step may take more than one turn."""
        return 2 * self.steps + 2 * PATIENCE

    @property
    def room(self) -> int:
        """Tokens of KV that it takes at least."""
        if self.mode == "prefill":
            # What was computed before stays in the cache until there is need.
            return self.batch * (self.context + 2 * self.extend)
        return self.batch * (self.context + self.new_tokens) + 4 * self.extend

    def __str__(self) -> str:
        context = f"{self.batch} requests of {self.context} tokens"
        if self.mode == "decode":
            return f"decode step of {context}"
        if self.mode == "prefill":
            return f"prefill of {self.extend} tokens each of {context}"
        return f"decode step of {context}, with a prompt of {self.extend} in the same batch"


class StageClock:
    """Step hooks that note when each stage of a step has ended. The engine makes it, by name; one at a time."""

    current: StageClock

    def __init__(self) -> None:
        StageClock.current = self
        self.batch: ScheduleBatch | None = None
        self._at: list[float] = []

    def begin(self) -> None:
        """Note that a step is about to begin."""
        self.batch = None
        self._at = [time.perf_counter()]

    def end(self) -> list[float]:
        """Return seconds of each stage; empty where no step was run."""
        at = [*self._at, time.perf_counter()]
        if len(at) != len(STAGES) + 1:
            return []
        return [after - before for before, after in itertools.pairwise(at)]

    @hookimpl
    def batch_scheduled(self, batch: ScheduleBatch) -> None:
        self.batch = batch
        self._at.append(time.perf_counter())

    @hookimpl
    def before_forward(self, batch: ForwardBatch) -> None:
        self._at.append(time.perf_counter())

    @hookimpl
    def after_forward(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        # On an asynchronous device the forward pass ends when the host waits for it.
        if output.next_token_ids.device.type != "cpu":
            output.next_token_ids.cpu()
        self._at.append(time.perf_counter())

    @hookimpl
    def batch_committed(self, batch: ScheduleBatch) -> None:
        self._at.append(time.perf_counter())


@dataclass(slots=True)
class Steps:
    """What was measured: seconds of each repetition, in all and by stage; and of the stages that the runner tells."""

    totals: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    forward: dict[str, list[float]] = field(default_factory=dict)

    def figures(self, tokens: int) -> dict[str, Any]:
        """Medians and minima in milliseconds, and tokens per second of the median step."""
        middle = statistics.median(self.totals)
        return {
            "repetitions": len(self.totals),
            "tokens": tokens,
            "tokens_per_s": tokens / middle,
            "total_ms": _ms(self.totals),
            "stages_ms": {name: _ms(values) for name, values in self.stages.items()},
            "forward_ms": {name: _ms(values) for name, values in self.forward.items()},
        }


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds) * 1000, "min": min(seconds) * 1000}


def resolve(settings: StepSettings, files: Sequence[Path], overrides: Sequence[str]) -> ResolvedConfig:
    """Return the config, with room for the shape, and with the clock. What `overrides` say has the last word."""
    room = settings.room * 5 // 4 + 4096
    own = [
        "scheduler.loop=normal",
        "scheduler.prefill_first=true",
        f"scheduler.mixed_chunk={'true' if settings.mode == 'mixed' else 'false'}",
        f"scheduler.max_running_requests={settings.batch + 1}",
        f"memory.max_total_tokens={-(-room // 4096) * 4096}",
    ]
    if settings.mode != "decode":
        own += ["scheduler.chunked_prefill_size=0", f"scheduler.max_prefill_tokens={max(16384, settings.tokens)}"]
    clock = Plugin(name="bench_step", version=__version__, hooks=(f"{StageClock.__module__}:{StageClock.__name__}",))
    registry = Registry.discover().with_plugins(clock, distribution="pegboard", version=__version__)
    return compose(files, overrides=[*own, *overrides], registry=registry)


class StepBench:
    """Runs the steps on an engine that was made with `resolve`."""

    def __init__(self, engine: Engine, settings: StepSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._random = np.random.default_rng(settings.seed)
        self._range = token_range_of(engine.info.vocab_size)
        self._clock = StageClock.current
        self._seen = ""

    def run(self, watch: Callable[[int], None] | None = None) -> Steps:
        """Run all repetitions. Raises PegboardError where no step gets the shape."""
        settings = self._settings
        measured = Steps()
        prompts = [self._tokens(settings.context) for _ in range(settings.batch)] if settings.context else []
        if settings.mode != "prefill":
            self._start(prompts or [self._tokens(1) for _ in range(settings.batch)])
        elif prompts:
            self._engine.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
        for number in range(settings.steps):
            if settings.mode == "prefill":
                for index in range(settings.batch):
                    self._submit([*(prompts[index] if prompts else ()), *self._tokens(settings.extend)], 1)
            elif settings.mode == "mixed":
                self._submit(self._tokens(settings.extend), 1)
            self._measure(measured if number >= settings.warmup else Steps())
            if watch is not None:
                watch(number + 1)
        return measured

    def _start(self, prompts: list[list[int]]) -> None:
        """Start requests that run until the end."""
        for prompt in prompts:
            self._submit(prompt, self._settings.new_tokens)
        for _ in range(len(prompts) * 4 + sum(map(len, prompts)) // 64 + PATIENCE):
            self._clock.begin()
            self._engine.poll()
            batch = self._clock.batch
            if batch is not None and batch.forward_mode.is_decode and len(batch) == len(prompts):
                return
        raise PegboardError(f"{len(prompts)} requests of {self._settings.context} tokens do not run at once")

    def _measure(self, into: Steps) -> None:
        """Run steps until one has the shape; keep that one's times."""
        runner, clock = self._engine.built.runner, self._clock
        for _ in range(PATIENCE):
            runner.stage_times()
            clock.begin()
            self._engine.poll()
            stages = clock.end()
            inside = runner.stage_times()
            if stages and clock.batch is not None and self._fits(clock.batch):
                into.totals.append(sum(stages))
                for name, seconds in zip(STAGES, stages, strict=True):
                    into.stages[name].append(seconds)
                for name, seconds in inside.items():
                    into.forward.setdefault(name, []).append(seconds)
                return
        raise PegboardError(
            f"no step was a {self._settings}; the last one was {self._seen or 'none'}. A context of a prefill comes "
            "from the prefix cache, in whole pages (memory.page_size)"
        )

    def _fits(self, batch: ScheduleBatch) -> bool:
        settings, decoding = self._settings, batch.decoding
        if batch.forward_mode.is_decode:
            decoding = len(batch)
        prefills = len(batch) - decoding
        lens = batch.extend_lens[:prefills].tolist()
        known = batch.prefix_lens[:prefills].tolist()
        self._seen = f"{decoding} decodes and prefills of {lens[:3]} tokens after {known[:3]}"
        if settings.mode == "decode":
            return decoding == settings.batch and not prefills
        if settings.mode == "mixed":
            return decoding == settings.batch and lens == [settings.extend]
        return not decoding and lens == [settings.extend] * settings.batch and set(known) == {settings.context}

    def _submit(self, prompt: list[int], new_tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(GenerateRequest(prompt=prompt, sampling=sampling, stream=True))

    def _tokens(self, count: int) -> list[int]:
        found: list[int] = self._random.integers(*self._range, count).tolist()
        return found
