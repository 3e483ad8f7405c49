"""``pegboard bench step``: one batch of a given shape, over and over, and where a step's time goes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from pegboard.tools.bench.images import ImageSize, draw, image_part
from pegboard.tools.bench.target import token_range_of

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput

STAGES = ("plan", "prepare", "forward", "results", "outputs")
"""What is measured of a step: the plan and where its memory is; arrays to tensors; the runner, with sampling;
tokens appended and checked; text."""
TOKEN_SIDE = 28
"""Pixels of a picture's token, at least: what is set aside for pictures follows from it."""
ENCODE = "encode"
"""This stage's name: the encoder, in steps of its own before the prefill of a prompt with pictures."""
DRAFT = "draft"
"""This stage's name: the speculator, and what is done with its drafts before the model gets them."""
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
    images: int = 0
    """New pictures of each prompt that is computed, of `image_size`."""
    image_size: ImageSize = field(default_factory=ImageSize)

    def __post_init__(self) -> None:
        if self.images and self.mode == "decode":
            raise PegboardError("--images is for --mode prefill and mixed: nothing is encoded in a decode step")

    @property
    def steps(self) -> int:
        """Steps that are run, some without being measured."""
        return self.repetitions + self.warmup

    @property
    def media_tokens(self) -> int:
        """More tokens than the pictures of a prompt have, for a model that makes one of 28 x 28 pixels or more."""
        size = self.image_size
        return self.images * ((size.width // TOKEN_SIDE + 2) * (size.height // TOKEN_SIDE + 2) + 64)

    @property
    def tokens(self) -> int:
        """New tokens of one step; with pictures no fewer."""
        extend = self.extend + self.media_tokens
        return {"decode": self.batch, "prefill": self.batch * extend, "mixed": self.batch + extend}[self.mode]

    @property
    def new_tokens(self) -> int:
        """Of a request that decodes all the while. A mixed step may take more than one turn."""
        return 2 * self.steps + 2 * PATIENCE

    @property
    def room(self) -> int:
        """Tokens of KV that it takes at least."""
        if self.mode == "prefill":
            # What was computed before stays in the cache until there is need.
            return self.batch * (self.context + 2 * (self.extend + self.media_tokens))
        return self.batch * (self.context + self.new_tokens) + 4 * (self.extend + self.media_tokens)

    def __str__(self) -> str:
        context = f"{self.batch} requests of {self.context} tokens"
        if self.mode == "decode":
            return f"decode step of {context}"
        new = f"{self.extend} tokens"
        if self.images:
            new += f" and {self.images} picture{'s' * (self.images > 1)} of {self.image_size}"
        if self.mode == "prefill":
            return f"prefill of {new} each of {context}"
        return f"decode step of {context}, with a prompt of {new} in the same batch"


class StageClock:
    """Step hooks that note when each stage of a step has ended. The engine makes it, by name; one at a time."""

    current: StageClock

    def __init__(self) -> None:
        StageClock.current = self
        self.batch: ScheduleBatch | None = None
        self.elapsed = 0.0
        """Seconds between the last `begin` and `end`."""
        self._at: list[float] = []

    def begin(self) -> None:
        """Note that a step is about to begin."""
        self.batch = None
        self._at = [time.perf_counter()]

    def end(self) -> list[float]:
        """Return seconds of each stage; empty where no step was run, or one that encoded."""
        at = [*self._at, time.perf_counter()]
        self.elapsed = at[-1] - at[0]
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
    stages: dict[str, list[float]] = field(default_factory=dict)
    forward: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    """New tokens of one step."""

    def add(self, stages: Mapping[str, float], forward: Mapping[str, float]) -> None:
        """Note a repetition."""
        self.totals.append(sum(stages.values()))
        for into, times in ((self.stages, stages), (self.forward, forward)):
            for name, seconds in times.items():
                into.setdefault(name, []).append(seconds)

    def figures(self) -> dict[str, Any]:
        """Medians and minima in milliseconds, and tokens per second of the median step."""
        middle = statistics.median(self.totals)
        return {
            "repetitions": len(self.totals),
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / middle,
            "total_ms": _ms(self.totals),
            "stages_ms": {name: _ms(values) for name, values in self.stages.items()},
            "forward_ms": {name: _ms(values) for name, values in self.forward.items()},
        }


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds) * 1000, "min": min(seconds) * 1000}


def resolve(settings: StepSettings, files: Sequence[str | Path], overrides: Sequence[str]) -> ResolvedConfig:
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
        most = max(16384, settings.tokens)
        own += ["scheduler.chunked_prefill_size=0", f"scheduler.max_prefill_tokens={most}"]
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
        self._pictures = self._picture_ids() if settings.images else []
        """A user's turn with pictures and nothing else."""

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
                    self._submit_new(prompts[index] if prompts else [])
            elif settings.mode == "mixed":
                self._submit_new([])
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
            if batch is not None and batch.decoding == len(batch) == len(prompts):
                return
        raise PegboardError(f"{len(prompts)} requests of {self._settings.context} tokens do not run at once")

    def _measure(self, into: Steps) -> None:
        """Run steps until one has the shape; keep that one's times, with those of the encodings before it."""
        runner, clock = self._engine.built.runner, self._clock
        encoding = dict.fromkeys(("plan", ENCODE), 0.0)
        for _ in range(PATIENCE):
            runner.stage_times()
            encoded, drafted = self._encoded, self._drafting
            clock.begin()
            self._engine.poll()
            stages = clock.end()
            inside = runner.stage_times()
            if stages and clock.batch is not None and self._fits(clock.batch):
                into.tokens = clock.batch.num_tokens
                times = self._with_drafting(dict(zip(STAGES, stages, strict=True)), self._drafting - drafted)
                into.add(self._with_encoding(times, encoding), inside)
                return
            if not stages and self._encoded > encoded:
                encoding[ENCODE] += self._encoded - encoded
                encoding["plan"] += clock.elapsed - (self._encoded - encoded)
        raise PegboardError(
            f"no step was a {self._settings}; the last one was {self._seen or 'none'}. A context of a prefill comes "
            "from the prefix cache, in whole pages (memory.page_size)"
        )

    @property
    def _encoded(self) -> float:
        """Seconds that the encoder has taken since the start."""
        return float(self._engine.stats()["encode_time"])

    @property
    def _drafting(self) -> float:
        """Seconds that drafting has taken since the start."""
        return self._engine.built.scheduler.components.points.reports.figures().get("draft_time", 0.0)

    def _with_drafting(self, stages: dict[str, float], seconds: float) -> dict[str, float]:
        """Return the stages of a step, drafting apart from the plan, if any tokens are ever drafted."""
        if not self._engine.built.scheduler.components.points.looking_ahead:
            return stages
        planned = stages.pop("plan") - seconds
        return {"plan": planned, DRAFT: seconds, **stages}

    def _with_encoding(self, stages: dict[str, float], encoding: Mapping[str, float]) -> dict[str, float]:
        """Return the stages of a step, those of the encodings before it included, in their order."""
        if not self._settings.images:
            return stages
        planned = stages.pop("plan") + encoding["plan"]
        return {"plan": planned, ENCODE: encoding[ENCODE], **stages}

    def _fits(self, batch: ScheduleBatch) -> bool:
        settings, decoding = self._settings, batch.decoding
        prefills = len(batch) - decoding
        lens = batch.extend_lens[:prefills].tolist()
        known = batch.prefix_lens[:prefills].tolist()
        self._seen = f"{decoding} decodes and prefills of {lens[:3]} tokens after {known[:3]}"
        if settings.mode == "decode":
            return decoding == settings.batch and not prefills
        # All pictures have one size, so that all prompts have one length.
        new = lens[0] if settings.images and lens and lens[0] > settings.extend else settings.extend
        if settings.mode == "mixed":
            return decoding == settings.batch and lens == [new]
        return not decoding and lens == [new] * settings.batch and set(known) == {settings.context}

    def _submit_new(self, context: list[int]) -> None:
        """Submit a prompt that is to be computed, after a context that is known."""
        settings, new = self._settings, self._tokens(self._settings.extend)
        if not settings.images:
            self._submit([*context, *new], 1)
            return
        pictures = [draw(self._random, settings.image_size) for _ in range(settings.images)]
        media = tuple(MediaInput(kind="image", data=one) for one in pictures)
        self._submit(MediaPrompt(base=[*context, *new, *self._pictures], media=media), 1)

    def _picture_ids(self) -> list[int]:
        tokenizer = self._engine.tokenizer
        parts = [image_part(self._engine)] * self._settings.images
        text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=False)
        return tokenizer.encode(text, add_special_tokens=False)

    def _submit(self, prompt: list[int] | MediaPrompt, new_tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(GenerateRequest(prompt=prompt, sampling=sampling, stream=True))

    def _tokens(self, count: int) -> list[int]:
        found: list[int] = self._random.integers(*self._range, count).tolist()
        return found
