"""Workloads: which requests come, and when. Everything is drawn from one seed, so a workload is the same each time."""

from __future__ import annotations

import abc
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import ConfigError
from pegboard.toolkit.text.near_names import or_hint
from pegboard.tools.lab.media import MEDIA_TOKEN, Medium

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCAB = 32_000
FIRST_TOKEN = 10
"""Tokens below it mean something: EOS is one of them."""


@dataclass(slots=True)
class Ask:
    """One request. `prompt` makes its tokens int64 [n] when it is sent, since a hundred thousand prompts at once would
    fill the memory. `output_len` is where the modelled model ends; `limit` is what the request states as
    max_new_tokens, all that a scheduler may know. `group` is what fairness is measured between.
    """

    at: float
    prompt: Callable[[], NDArray[np.int64]]
    output_len: int
    limit: int
    group: str
    priority: int = 0
    media: tuple[Medium, ...] = ()
    then: Callable[[float, NDArray[np.int64]], list[Ask]] | None = None
    """What follows once it has ended: from its end and its whole sequence, prompt and answer, to further requests."""


MEDIA: Mapping[str, float] = {"items": 0, "media_tokens": 1024, "pieces": 1, "distinct": 0}
"""Parameters of workloads that may have media: each question has so many `items` of so many tokens in `pieces`. Each
item is new, or one of `distinct` ones.
"""


class Workload(abc.ABC):
    """Requests whose times are known from the start, in order of time; others follow from their answers."""

    parameters: Mapping[str, float] = {}
    """Defaults of what ``name:key=value,...`` may set."""
    summary = ""

    def __init__(self, requests: int, rate: float, seed: int, values: Mapping[str, float]) -> None:
        self.requests = requests
        self.rate = rate
        self.random = np.random.default_rng(seed)
        self.values = {**self.parameters, **values}
        self._contents = itertools.count()

    @property
    def has_media(self) -> bool:
        """Whether some of its prompts have media."""
        return self.values.get("items", 0) >= 1

    @abc.abstractmethod
    def arrivals(self) -> Iterator[Ask]: ...

    def _times(self, count: int, rate: float | None = None) -> NDArray[np.float64]:
        """Poisson arrivals at `rate` per second; all at once for an infinite one."""
        rate = self.rate if rate is None else rate
        if np.isinf(rate):
            return np.zeros(count)
        return np.cumsum(self.random.exponential(1.0 / rate, count))

    def _tokens(self, n: int) -> NDArray[np.int64]:
        return self.random.integers(FIRST_TOKEN, VOCAB, int(n))

    def _length(self, mean: float, spread: float) -> int:
        """Uniform between (1 - spread) and (1 + spread) times the mean; one at least."""
        return max(1, round(mean * self.random.uniform(1 - spread, 1 + spread)))

    def _items(self, start: int) -> tuple[Medium, ...]:
        """Return the items of a question, which stand from `start` on."""
        values = self.values
        pieces, distinct = max(1, int(values["pieces"])), int(values["distinct"])
        tokens = max(1, int(values["media_tokens"]) // pieces) * pieces
        found = []
        for index in range(int(values["items"])):
            content = int(self.random.integers(distinct)) if distinct else next(self._contents)
            found.append(Medium(content, start + index * tokens, tokens, pieces))
        return tuple(found)

    def _limit(self, output_len: int) -> int:
        """Clients ask for more than they get."""
        return max(output_len, int(self.values.get("limit", 0)) or 2 * output_len)


class SharedPrefix(Workload):
    """Groups of requests, each with a system prompt of its own and a question; in random order. As SGLang's
    generated-shared-prefix benchmark.
    """

    summary = "groups that share a system prompt, a question of its own each, in random order"
    parameters = {"groups": 64, "system": 2048, "question": 128, "output": 256, "spread": 0.0, "limit": 0, **MEDIA}

    def arrivals(self) -> Iterator[Ask]:
        values = self.values
        stems = [self._tokens(int(values["system"])) for _ in range(int(values["groups"]))]
        members = np.resize(np.arange(len(stems)), self.requests)
        self.random.shuffle(members)
        for at, group in zip(self._times(self.requests).tolist(), members.tolist(), strict=True):
            question = self._tokens(self._length(values["question"], values["spread"]))
            output = self._length(values["output"], values["spread"])
            media = self._items(len(stems[group]))
            prompt = _joined(stems[group], *_places(media), question)
            yield Ask(at, prompt, output, self._limit(output), f"group {group}", media=media)


class Random(Workload):
    """Prompts that share nothing, of random lengths. A share of them is urgent (`priority` 10)."""

    summary = "prompts that share nothing, of random lengths; some may be urgent"
    parameters = {"input": 1024, "output": 256, "spread": 0.9, "urgent": 0.0, "limit": 0, **MEDIA}

    def arrivals(self) -> Iterator[Ask]:
        values = self.values
        for at in self._times(self.requests).tolist():
            prompt = self._tokens(self._length(values["input"], values["spread"]))
            output = self._length(values["output"], values["spread"])
            urgent = bool(self.random.random() < values["urgent"])
            group = "urgent" if urgent else "normal"
            # After the text, so that no prefix is shared where items are.
            media = self._items(len(prompt))
            whole = _joined(prompt, *_places(media))
            yield Ask(at, whole, output, self._limit(output), group, 10 if urgent else 0, media)


class Chat(Workload):
    """Conversations: each turn comes some time after the answer to the one before, and contains everything so far."""

    summary = "conversations; a turn comes some time after the answer before it, and contains everything so far"
    parameters = {
        "turns": 5, "system": 512, "question": 64, "output": 192, "think": 10.0, "spread": 0.5, "systems": 4,
        "limit": 0, **MEDIA,
    }  # fmt: skip

    def arrivals(self) -> Iterator[Ask]:
        values = self.values
        turns = max(1, int(values["turns"]))
        count = max(1, self.requests // turns)
        systems = [self._tokens(int(values["system"])) for _ in range(max(1, int(values["systems"])))]
        for number, at in enumerate(self._times(count, self.rate / turns).tolist()):
            yield self._turn(at, systems[number % len(systems)], f"chat {number}", turns)

    def _turn(self, at: float, so_far: NDArray[np.int64], group: str, left: int, shown: tuple[Medium, ...] = ()) -> Ask:
        values = self.values
        question = self._tokens(self._length(values["question"], values["spread"]))
        output = self._length(values["output"], values["spread"])
        new = self._items(len(so_far))
        media = (*shown, *new)

        def then(ended: float, whole: NDArray[np.int64]) -> list[Ask]:
            think = float(self.random.exponential(values["think"]))
            return [self._turn(ended + think, whole, group, left - 1, media)]

        prompt = _joined(so_far, *_places(new), question)
        return Ask(at, prompt, output, self._limit(output), group, media=media, then=then if left > 1 else None)


class Agents(Workload):
    """Trees of calls: each answer spawns several further calls that contain everything before them."""

    summary = "trees of calls: each answer leads to several more that contain everything before them"
    parameters = {
        "depth": 3, "branch": 3, "task": 1024, "step": 128, "output": 128, "work": 1.0, "spread": 0.3, "limit": 0,
    }  # fmt: skip

    def arrivals(self) -> Iterator[Ask]:
        depth, branch = max(1, int(self.values["depth"])), max(1, int(self.values["branch"]))
        each = sum(branch**level for level in range(depth))
        count = max(1, self.requests // each)
        for number, at in enumerate(self._times(count, self.rate / each).tolist()):
            yield self._call(at, self._tokens(int(self.values["task"])), f"agent {number}", depth)

    def _call(self, at: float, so_far: NDArray[np.int64], group: str, left: int) -> Ask:
        values = self.values
        step = self._tokens(self._length(values["step"], values["spread"]))
        output = self._length(values["output"], values["spread"])

        def then(ended: float, whole: NDArray[np.int64]) -> list[Ask]:
            return [
                self._call(ended + float(self.random.exponential(values["work"])), whole, group, left - 1)
                for _ in range(max(1, int(values["branch"])))
            ]

        return Ask(at, _joined(so_far, step), output, self._limit(output), group, then=then if left > 1 else None)


class Trace(Workload):
    """A JSON Lines file, one request per line: `timestamp` (seconds), `input_length`, `output_length`, and either
    `prompt` (token ids) or `hash_ids` (one id per block of `block` tokens: equal ids, equal tokens), `priority`,
    `group`, and `media`: objects with `id` (equal ids look the same), `start` and `tokens`, and `pieces` for videos.
    """

    summary = "requests from a JSON Lines file"
    parameters = {"block": 512, "speed": 1.0, "limit": 0}
    path = Path()

    @functools.cached_property
    def asks(self) -> list[Ask]:
        """All requests, in order of time. Raises ConfigError for a line that is none."""
        lines = [line for line in self.path.read_text("utf-8").splitlines() if line.strip()]
        asks = [self._ask(number, line) for number, line in enumerate(lines[: self.requests], 1)]
        return sorted(asks, key=lambda ask: ask.at)

    @property
    def has_media(self) -> bool:
        return any(ask.media for ask in self.asks)

    def arrivals(self) -> Iterator[Ask]:
        yield from self.asks

    def _ask(self, number: int, line: str) -> Ask:
        try:
            said = json.loads(line)
            output = max(1, int(said["output_length"]))
            at = float(said.get("timestamp", 0.0)) / self.values["speed"]
            group, priority = str(said.get("group", "")), int(said.get("priority", 0))
            ids = [int(one) for one in said.get("hash_ids", ())]
            known = np.array(said["prompt"], np.int64) if "prompt" in said else None
            length = max(1, int(said["input_length"])) if known is None else len(known)
            media = _media_of(said.get("media", ()), length)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path}, line {number}: {type(error).__name__}: {error}") from None

        def prompt() -> NDArray[np.int64]:
            return _shown(self._blocks(length, ids, number) if known is None else known.copy(), media)

        return Ask(at, prompt, output, self._limit(output), group, priority, media)

    def _blocks(self, length: int, ids: list[int], number: int) -> NDArray[np.int64]:
        """Return tokens that are equal where the ids are; what no id covers is the line's own."""
        block = int(self.values["block"])
        parts = [np.random.default_rng((1, one)).integers(FIRST_TOKEN, VOCAB, block) for one in ids]
        rest = max(0, length - block * len(ids))
        parts.append(np.random.default_rng((2, number)).integers(FIRST_TOKEN, VOCAB, rest))
        return np.concatenate(parts)[: max(1, length)]


WORKLOADS: dict[str, type[Workload]] = {
    "shared-prefix": SharedPrefix,
    "random": Random,
    "chat": Chat,
    "agents": Agents,
}


@dataclass(slots=True)
class WorkloadChoice:
    """What the command line named: a workload, and what it sets of its parameters."""

    name: str
    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> WorkloadChoice:
        """``name`` or ``name:key=value,key=value``; a path that ends in .jsonl is a trace. Raises ConfigError."""
        name, _, rest = text.partition(":")
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            try:
                values[key.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"workload {name}: {part!r} is not key=number") from None
        choice = cls(name, values)
        known = choice.kind.parameters
        for key in values:
            if key not in known:
                hint = or_hint(key, list(known))
                raise ConfigError(f"workload {name} has no parameter {key!r}; {hint}it has: {', '.join(known)}")
        return choice

    @property
    def kind(self) -> type[Workload]:
        if self.name.endswith(".jsonl"):
            return Trace
        if self.name not in WORKLOADS:
            names = list(WORKLOADS)
            raise ConfigError(
                f"workload {self.name!r} is unknown; {or_hint(self.name, names)}known: {', '.join(names)}, or "
                "the path of a .jsonl file"
            )
        return WORKLOADS[self.name]

    def build(self, requests: int, rate: float, seed: int) -> Workload:
        """Return the workload, drawn anew: the same for the same seed."""
        workload = self.kind(requests, rate, seed, self.values)
        if isinstance(workload, Trace):
            workload.path = Path(self.name)
            if not workload.path.is_file():
                raise ConfigError(f"workload {self.name}: there is no such file")
        return workload


def _joined(*parts: NDArray[np.int64]) -> Callable[[], NDArray[np.int64]]:
    return lambda: np.concatenate(parts)


def _places(media: Sequence[Medium]) -> list[NDArray[np.int64]]:
    """Return the tokens that stand for media."""
    return [np.full(one.tokens, MEDIA_TOKEN, np.int64) for one in media]


def _shown(tokens: NDArray[np.int64], media: Sequence[Medium]) -> NDArray[np.int64]:
    """Put media in the place of a prompt's own tokens."""
    for one in media:
        tokens[one.start : one.start + one.tokens] = MEDIA_TOKEN
    return tokens


def _media_of(said: Sequence[Mapping[str, int]], length: int) -> tuple[Medium, ...]:
    """Read the media of a trace's line. Raises ValueError where they are not in order, or not in the prompt."""
    found = [Medium(int(one["id"]), int(one["start"]), int(one["tokens"]), int(one.get("pieces", 1))) for one in said]
    ends = [0, *(one.start + one.tokens for one in found)]
    if any(one.start < end for one, end in zip(found, ends, strict=False)) or ends[-1] > length:
        raise ValueError(f"media must stand one after the other within the prompt's {length} tokens")
    return tuple(found)
