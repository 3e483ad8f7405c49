"""Workloads: what is asked, of which lengths, in which conversations. All from one seed: the same for every server."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.apis import Prompt
from pegboard.tools.bench.images import ImageSize, content_part, draw
from pegboard.tools.bench.words import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.random import Generator


WARM_UP_RUN = 1 << 20
"""The number of the warm-up among the runs, whose prompts are its own."""


class Kind(StrEnum):
    """What a prompt is made of."""

    TOKENS = "tokens"
    TEXT = "text"
    MESSAGES = "messages"


@dataclass(slots=True)
class Turn:
    """What is new in one turn of a conversation."""

    new: Prompt
    output_len: int
    input_len: int | None = None
    """How many tokens are new, where that is known."""


@dataclass(slots=True)
class Session:
    """Turns that follow each other, each with all before it; one turn, mostly. `at` is when it begins, in seconds,
    where the workload says so.
    """

    turns: list[Turn]
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of a workload's requests, in tokens."""

    requests: int = 0
    """0: as many as a file has, or a hundred."""
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are drawn between (1 - ratio) and (1 + ratio) times what they are on average."""
    groups: int = 1
    prefix_len: int = 1024
    turns: int = 4
    images: int = 1
    image_size: ImageSize = field(default_factory=ImageSize)

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise PegboardError(f"--range-ratio must be at least 0 and below 1, got {self.range_ratio:g}")


class Source(abc.ABC):
    """Makes pieces of prompts of a given number of tokens."""

    def __init__(self, random: Generator) -> None:
        self._random = random

    @abc.abstractmethod
    def draw(self, count: int) -> Prompt:
        """`count` tokens that come from nowhere."""

    @abc.abstractmethod
    def join(self, first: Any, second: Any) -> Prompt:
        """Return one prompt of two pieces."""


class TokenSource(Source):
    """Token ids from a range."""

    def __init__(self, random: Generator, low: int, high: int) -> None:
        super().__init__(random)
        self._range = low, high

    def draw(self, count: int) -> Prompt:
        found: list[int] = self._random.integers(*self._range, count).tolist()
        return found

    def join(self, first: Any, second: Any) -> Prompt:
        return [*first, *second]


class WordSource(Source):
    """Common words, each of which is one token for nearly every tokenizer."""

    def draw(self, count: int) -> Prompt:
        return "".join(f" {WORDS[i]}" for i in self._random.integers(0, len(WORDS), count).tolist())

    def join(self, first: Any, second: Any) -> Prompt:
        return f"{first}{second}"


class MessageSource(WordSource):
    """Words, in messages. What is joined in front of another piece is the system's message."""

    def draw(self, count: int) -> Prompt:
        return [{"role": "user", "content": str(super().draw(count)).strip()}]

    def join(self, first: Any, second: Any) -> Prompt:
        return [{"role": "system", "content": "\n".join(one["content"] for one in first)}, *second]


def source(kind: Kind, random: Generator, token_range: tuple[int, int]) -> Source:
    """Return the source of prompts of this kind."""
    if kind is Kind.TOKENS:
        return TokenSource(random, *token_range)
    return WordSource(random) if kind is Kind.TEXT else MessageSource(random)


def follow(so_far: Prompt, answer: Sequence[int] | str, new: Prompt) -> Prompt:
    """Return the prompt of the next turn: all before it, its answer, and what is new."""
    if isinstance(so_far, str):
        return f"{so_far}{answer}{new}"
    if so_far and isinstance(so_far[0], dict):
        return [*so_far, {"role": "assistant", "content": answer}, *new]
    return [*so_far, *answer, *new]


@dataclass(slots=True)
class Workload(abc.ABC):
    """Makes the sessions of a run."""

    shape: Shape
    kind: Kind
    token_range: tuple[int, int]
    seed: int

    def sessions(self, run: int = 0) -> list[Session]:
        """Return all of a run's, in order. Runs of different numbers share nothing, so that no cache knows one from
        another; those of the same number are the same.
        """
        random = np.random.default_rng((self.seed, run))
        return list(self._make(random, source(self.kind, random, self.token_range)))

    @abc.abstractmethod
    def _make(self, random: Generator, source: Source) -> Iterator[Session]: ...

    def _length(self, random: Generator, mean: int) -> int:
        ratio = self.shape.range_ratio
        if not ratio:
            return max(1, mean)
        low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
        return max(1, int(random.integers(low, high + 1)))

    def _turn(self, random: Generator, source: Source) -> Turn:
        length = self._length(random, self.shape.input_len)
        return Turn(source.draw(length), self._length(random, self.shape.output_len), length)


class Random(Workload):
    """Prompts that share nothing."""

    def _make(self, random: Generator, source: Source) -> Iterator[Session]:
        for _ in range(self.shape.requests):
            yield Session([self._turn(random, source)])


class SharedPrefix(Workload):
    """Groups that share a prefix, with something of each request's own after it; in random order."""

    def _make(self, random: Generator, source: Source) -> Iterator[Session]:
        shape = self.shape
        stems = [source.draw(shape.prefix_len) for _ in range(shape.groups)]
        members = np.resize(np.arange(shape.groups), shape.requests)
        random.shuffle(members)
        for group in members.tolist():
            turn = self._turn(random, source)
            turn.new = source.join(stems[group], turn.new)
            turn.input_len = shape.prefix_len + (turn.input_len or 0)
            yield Session([turn])


class MultiTurn(Workload):
    """Conversations: each turn holds all that was said before, the server's answers included."""

    def _make(self, random: Generator, source: Source) -> Iterator[Session]:
        left = self.shape.requests
        while left > 0:
            turns = [self._turn(random, source) for _ in range(min(left, self.shape.turns))]
            left -= len(turns)
            yield Session(turns)


class Images(Workload):
    """Questions about pictures, each of which is new."""

    def _make(self, random: Generator, source: Source) -> Iterator[Session]:
        if self.kind is not Kind.MESSAGES:
            raise PegboardError("--workload images asks in chats; leave out --api, or take openai-chat")
        for _ in range(self.shape.requests):
            turn = self._turn(random, source)
            pictures = [content_part(draw(random, self.shape.image_size)) for _ in range(self.shape.images)]
            turn.new = [
                {**one, "content": [*pictures, {"type": "text", "text": one["content"]}]}
                for one in turn.new
                if isinstance(one, dict)
            ]
            # How many tokens a picture has is the server's affair.
            turn.input_len = None
            yield Session([turn])


IMAGES = "images"
WORKLOADS: dict[str, type[Workload]] = {
    "random": Random,
    "shared-prefix": SharedPrefix,
    "multi-turn": MultiTurn,
    IMAGES: Images,
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent: `rate` per second on average (inf: at once). Gaps are gamma distributed; with a
    `burstiness` of 1 that is a Poisson process, below it they come in bursts, above it more evenly.
    """

    rate: float = float("inf")
    burstiness: float = 1.0

    def times(self, count: int, seed: int, run: int = 0) -> list[float]:
        """`count` times in seconds, the first one 0."""
        if np.isinf(self.rate):
            return [0.0] * count
        random = np.random.default_rng((seed, run, 1))
        gaps = random.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        gaps[:1] = 0
        found: list[float] = np.cumsum(gaps).tolist()
        return found
