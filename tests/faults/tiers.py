"""Conversations over KV in tiers, and what an engine that computes everything answers to them.

All conversations ask the same questions behind prompts of their own, so an answer is right only if all of the KV before
it is. Answers hold in any batch, and under any order of sums: a conversation with a close choice in it is left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams

TURNS = 3
NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
CLEAR = 0.01
"""How far the runner-up is behind, in logprobs, for each token of an answer."""
VOCAB = 300
POOL = 4096
"""Tokens on the device, and on the host: fewer than all conversations have."""
PLENTY = 0.5
"""Seconds that a request may take beyond twice what computing all of it does."""


@dataclass(frozen=True)
class Turn:
    """What is asked, with all that was said before, and the right answer."""

    prompt: list[int]
    answer: list[int]


def config(model: Path, **sections: Any) -> dict[str, Any]:
    """Return the config of an engine, or a server, for the tiny model."""
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu", "context_length": 4096},
        "attention": {"use": "torch"},
        "log_level": "error",
        **sections,
    }


def tiers(storage: Mapping[str, Any] | None, *, wait: str = "timeout", write: str = "write_through") -> dict[str, Any]:
    """Return the sections of an engine with a host tier, and a storage behind it: by which policies requests wait for
    it, and pages are written.
    """
    return {
        "prefix_cache": {"use": "hiradix", "write_policy": write},
        "memory": {
            "page_size": 16,
            "max_total_tokens": POOL,
            "host": {"max_total_tokens": POOL},
            "storage": [] if storage is None else [dict(storage)],
        },
        "gates": [] if storage is None else [{"use": "prefetch", "policy": wait}],
    }


class World:
    """An engine that keeps nothing, and `talks`: conversations of TURNS turns, which it has answered."""

    def __init__(self, model: Path, talks: int, first: int = 520) -> None:
        self.model = model
        keeps_nothing = {"prefix_cache": {"use": "none"}, "memory": {"max_total_tokens": 32 * 1024}}
        self.plain = Engine.from_config(config(model, **keeps_nothing))
        draw = np.random.default_rng(18)
        questions = [draw.integers(3, VOCAB, 70).tolist() for _ in range(TURNS)]
        self.talks: list[list[Turn]] = []
        while len(self.talks) < talks:
            starts = [draw.integers(3, VOCAB, first).tolist() for _ in range(talks - len(self.talks))]
            self.talks += [talk for talk in self._answered(starts, questions) if talk]
        answers = {tuple(talk[turn].answer) for talk in self.talks for turn in range(TURNS)}
        assert len(answers) > 0.9 * TURNS * talks, "the answers do not depend on what was said before"

    def close(self) -> None:
        self.plain.close()

    def _answered(self, starts: list[list[int]], questions: Sequence[list[int]]) -> list[list[Turn]]:
        """Return conversations; empty ones for those in which two tokens were close."""
        said, talks = starts, [list[Turn]() for _ in starts]
        clear = [True] * len(starts)
        for question in questions:
            prompts = [one + question for one in said]
            outputs = self.plain.generate(prompts, GREEDY, logprobs=2)
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                tops = [top for _, _, top in output.logprobs or []]
                assert len(tops) == NEW
                clear[number] = clear[number] and all(first[0] - second[0] > CLEAR for first, second in tops)
                talks[number].append(Turn(prompt, output.token_ids))
            said = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        return [talk if sure else [] for talk, sure in zip(talks, clear, strict=True)]


@contextlib.contextmanager
def answered(model: Path, talks: int) -> Iterator[World]:
    world = World(model, talks)
    yield world
    world.close()


def ask(
    engine: Engine, turns: Sequence[Turn], meanwhile: Callable[[], None] | None = None
) -> tuple[list[GenerateOutput], list[float]]:
    """Ask several at once, and compare the answers. Return them, and the seconds that each took.

    `meanwhile` is called with each step.
    """
    begun = time.perf_counter()
    requests = [GenerateRequest(prompt=turn.prompt, sampling=GREEDY, stream=True) for turn in turns]
    outputs = {rid: GenerateOutput(rid) for rid in map(engine.submit, requests)}
    took: dict[str, float] = {}
    while len(took) < len(turns):
        if meanwhile is not None:
            meanwhile()
        for chunk in engine.poll():
            outputs[chunk.rid].add(chunk)
            if chunk.finish_reason is not None:
                took[chunk.rid] = time.perf_counter() - begun
    for turn, output in zip(turns, outputs.values(), strict=True):
        assert output.finish_reason["type"] == "length", output.finish_reason
        assert output.token_ids == turn.answer, "a wrong token"
    return list(outputs.values()), [took[rid] for rid in outputs]


def settle(engine: Engine, seconds: float = 60.0) -> None:
    """Let what is on its way arrive, and look at the books."""
    scheduler = engine.built.scheduler
    until = time.monotonic() + seconds
    while scheduler.busy:
        assert time.monotonic() < until, "it does not come to rest"
        scheduler.step()
        time.sleep(0.001)
    assert scheduler.components.memory.idle_error() is None
    scheduler.components.memory.cache.check()
    stats = engine.stats()
    assert stats["plugin_failures"] == stats["book_errors"] == stats["failed_batches"] == 0


class Scene:
    """Conversations over an engine with tiers, beside the one that computes everything."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.world = world
        self.engine = engine
        self.late = 0.0
        """Seconds that some request took beyond what it may."""
        self.from_storage = 0
        """Tokens of prompts that came from storages."""

    def say(self, *turns: int, meanwhile: Callable[[], None] | None = None, together: int = 4) -> None:
        """Have these turns of all conversations, a few conversations at a time."""
        talks = self.world.talks
        for turn in turns:
            for start in range(0, len(talks), together):
                some = [talk[turn] for talk in talks[start : start + together]]
                _, alone = ask(self.world.plain, some)
                outputs, took = ask(self.engine, some, meanwhile=meanwhile)
                self.from_storage += sum(output.cached_storage for output in outputs)
                over = [mine - 2 * other - PLENTY for mine, other in zip(took, alone, strict=True)]
                self.late = max(self.late, *over)

    def tells(self, name: str) -> float:
        """Return one of the figures in /server_info's section `tiers`."""
        return float(self.engine.stats()["tiers"][name])

    def flush(self) -> None:
        """Forget what is on the device and the host: what is found from now on is found in storages."""
        settle(self.engine)
        self.engine.flush_cache()


@contextlib.contextmanager
def scene(world: World, storage: Mapping[str, Any], **more: Any) -> Iterator[Scene]:
    with Engine.from_config(config(world.model, **tiers(storage, **more))) as engine:
        yield Scene(world, engine)
        settle(engine)


def in_time(play: Callable[[int], float], tries: int = 3) -> None:
    """Play a scene, which gives back by how much its latest request was late; again where one was, as the machine may
    have been busy. What is late by itself is late each time.
    """
    late = [play(0)]
    while late[-1] > 0 and len(late) < tries:
        late.append(play(len(late)))
    assert min(late) <= 0, f"each time some request was late, by {late} s"
