"""Answers of the engine in this process, in files of whole answers.

The answers of a file are generated together and from an empty cache, so that they do not depend on where a run before
was stopped.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.client import GenerateRequest, failure
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.tools.train_draft.prompts import Conversation, Encoder, Prompts
from pegboard.tools.train_draft.settings import MAX_PROMPT, SHARD, AnswerSettings
from pegboard.tools.train_draft.workdir import WorkDir, replacing

if TYPE_CHECKING:
    from pegboard.core.engine.engine import Engine
    from pegboard.tools.train_draft.progress import Watcher

HELD_OUT = "held-out"


class Stopped(Exception):
    """The user has asked to stop."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt and of what the model said."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """A file of answers: to how many prompts, and those that did not fail."""

    asked: int
    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        return sum(len(one.answer) for one in self.answers)


class AnswerFiles:
    """The files of a run: 00000, 00001 ... to train on, and that of the held-out prompts."""

    def __init__(self, folder: WorkDir) -> None:
        self._folder = folder.data / "answers"

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def names(self) -> list[str]:
        """Return the names of the files to train on, in order."""
        found = sorted(path.stem for path in self._folder.glob("[0-9]*.json"))
        return [name for index, name in enumerate(found) if name == f"{index:05}"]

    def read(self, name: str) -> AnswerFile:
        """Return what is in a file. Raises PegboardError where it is not a file of this command."""
        try:
            found = json.loads(self.path(name).read_text("utf-8"))
            return AnswerFile(found["asked"], tuple(Answer(*one) for one in found["answers"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PegboardError(f"{self.path(name)} cannot be read: {error}; --overwrite starts anew") from None

    def write(self, name: str, found: AnswerFile) -> None:
        answers = [[one.prompt, one.answer] for one in found.answers]
        with replacing(self.path(name)) as new:
            new.write_text(json.dumps({"asked": found.asked, "answers": answers}, separators=(",", ":")), "utf-8")

    def __iter__(self) -> Iterator[AnswerFile]:
        return (self.read(name) for name in self.names())


class Answering:
    """Has an engine answer prompts until there are enough tokens."""

    def __init__(
        self,
        engine: Engine,
        settings: AnswerSettings,
        prompts: Prompts,
        files: AnswerFiles,
        stopped: Callable[[], bool],
        watch: Watcher,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._prompts = prompts
        self._files = files
        self._stopped = stopped
        self._watch = watch
        self._encoder = Encoder(engine)
        self._before = 0
        """Answer tokens of files that are complete."""
        self._length = 1.0
        """What answers are likely to have, as those to held-out prompts tell."""
        self._problem = ""

    def go(self) -> None:
        """Write the files that are missing. Raises Stopped; the files that are there are whole then.

        Raises PegboardError where no prompt at all can be answered.
        """
        if not self._files.path(HELD_OUT).exists():
            self._files.write(HELD_OUT, self._answered(self._prompts.held_out, 0, greedy=1.0))
        held_out = self._files.read(HELD_OUT)
        self._check(held_out.tokens, "of the held-out prompts")
        self._length = held_out.tokens / len(held_out.answers)
        found = list(self._files)
        at = sum(one.asked for one in found)
        self._before = sum(one.tokens for one in found)
        while self._before < self._settings.tokens and at < len(self._prompts.train):
            some = self._prompts.train[at : at + self._many()]
            new = self._answered(some, at, greedy=self._settings.greedy)
            self._files.write(f"{len(found):05}", new)
            found.append(new)
            at += new.asked
            self._before += new.tokens
        self._check(self._before, "of the prompts")

    def _check(self, tokens: int, which: str) -> None:
        if not tokens:
            raise PegboardError(f"none {which} could be answered: {self._problem or 'all answers are empty'}")

    def _many(self) -> int:
        """Return how many prompts go into the next file: no more than are likely to be needed."""
        missing = self._settings.tokens - self._before
        return max(1, min(SHARD, math.ceil(missing / self._length)))

    def _answered(self, prompts: Sequence[Conversation], first: int, *, greedy: float) -> AnswerFile:
        """Return the answers to `prompts`, of which the first has the number `first`."""
        self._engine.flush_cache()
        queue = deque((number, self._encoder.ids(prompt)) for number, prompt in enumerate(prompts, first))
        asked: dict[str, tuple[int, list[int]]] = {}
        said: dict[int, list[int]] = {}
        done: dict[int, Answer] = {}
        problem = ""
        try:
            while queue or asked:
                if self._stopped():
                    raise Stopped
                while queue and len(asked) < self._settings.streams:
                    number, ids = queue.popleft()
                    try:
                        asked[self._send(ids, self._sampling(number, greedy))] = number, ids
                    except InvalidRequest as error:
                        problem = error.message
                for chunk in self._engine.poll():
                    number, ids = asked[chunk.rid]
                    said.setdefault(number, []).extend(chunk.token_ids)
                    if chunk.finish_reason is None:
                        continue
                    del asked[chunk.rid]
                    failed = failure(chunk.finish_reason)
                    if failed is not None:
                        problem = failed.message
                    elif said[number]:
                        done[number] = Answer(ids, said[number])
                self._watch(self._before + sum(map(len, said.values())))
        finally:
            self._engine.abort(*asked)
        self._problem = problem or self._problem
        return AnswerFile(len(prompts), tuple(done[number] for number in sorted(done)))

    def _send(self, ids: list[int], sampling: SamplingParams) -> str:
        if len(ids) > MAX_PROMPT:
            raise InvalidRequest(f"the prompt has {len(ids)} tokens, more than {MAX_PROMPT}", param="prompt")
        return self._engine.submit(GenerateRequest(prompt=ids, sampling=sampling, add_special_tokens=False))

    def _sampling(self, number: int, share: float) -> SamplingParams:
        settings = self._settings
        greedy = math.floor((number + 1) * share) > math.floor(number * share)
        return SamplingParams(
            max_new_tokens=settings.max_new_tokens,
            temperature=0.0 if greedy else settings.temperature,
            seed=settings.seed * 1_000_003 + number,
        )
