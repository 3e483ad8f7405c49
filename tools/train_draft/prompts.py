"""Prompts: those of a file, or varied ones of our own. Some are held out, and no answer to them is trained on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.train_draft.topics import IDEAS, PAIR_TEMPLATES, SUBJECTS, Subject

if TYPE_CHECKING:
    from pegboard.core.engine.engine import Engine

HELD_OUT_SHARE = 0.125
"""Of the topics of our own prompts: held-out prompts are about these, and no other prompt is."""
_SHOWN = 5

Conversation = tuple[tuple[str, str], ...]
"""Role and content of each message; a single message without a role is text that stands as it is."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to train on, in order, and those held out for evaluation. None is in both."""

    train: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]

    @property
    def digest(self) -> str:
        """Tell these from others."""
        return hashlib.sha256(json.dumps([self.train, self.held_out]).encode()).hexdigest()[:16]


def built_in(seed: int, held_out: int) -> Prompts:
    """Return several thousand prompts of our own, in an order that `seed` draws, and `held_out` about other topics."""
    chance = random.Random(seed)
    train: list[str] = []
    kept: list[str] = []
    for subject in SUBJECTS:
        topics = list(subject.topics)
        chance.shuffle(topics)
        few = max(1, round(len(topics) * HELD_OUT_SHARE))
        kept += _filled(Subject(tuple(topics[:few]), subject.templates))
        train += _filled(Subject(tuple(topics[few:]), subject.templates))
        if subject is IDEAS:
            pairs = list(combinations(sorted(topics[few:]), 2))
            train += [chance.choice(PAIR_TEMPLATES).format(*pair) for pair in chance.sample(pairs, 1000)]
    chance.shuffle(train)
    chance.shuffle(kept)
    if held_out > len(kept):
        raise PegboardError(f"--held-out must be at most {len(kept)} with the built-in prompts, got {held_out}")
    return Prompts(tuple(_asked(text) for text in train), tuple(_asked(text) for text in kept[:held_out]))


def _filled(subject: Subject) -> list[str]:
    return [template.format(topic) for topic in subject.topics for template in subject.templates]


def _asked(text: str) -> Conversation:
    return (("user", text),)


def from_file(path: Path, seed: int, held_out: int) -> Prompts:
    """Return the prompts of a file of JSON lines, in an order that `seed` draws; the first `held_out` are held out.

    A line has a `prompt`, which becomes a user's message, or `messages`. The same prompt counts once. Raises
    PegboardError for lines that have neither, and for a file with too few.
    """
    from pegboard.tools.batch.lines import BadLine, Defaults, PromptFile

    found: dict[Conversation, None] = {}
    problems: list[str] = []
    if not path.is_file():
        raise PegboardError(f"--prompts: there is no file {path}")
    with contextlib.closing(PromptFile(path)) as source:
        for line in source.lines(Defaults({}, chat=True)):
            if isinstance(line, BadLine):
                problems.append(f"{path}:{line.number}: {line.problem}")
            elif line.messages:
                found[tuple((str(one["role"]), str(one["content"] or "")) for one in line.messages)] = None
            else:
                problems.append(f"{path}:{line.number}: token ids cannot be trained on; prompt must be text")
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise PegboardError("\n  ".join([f"--prompts: {len(problems)} lines are wrong:", *problems[:_SHOWN], *more]))
    if len(found) <= held_out:
        raise PegboardError(
            f"--prompts: {path} has {len(found)} different prompts, and --held-out {held_out} leaves none to train on"
        )
    prompts = list(found)
    random.Random(seed).shuffle(prompts)
    return Prompts(tuple(prompts[held_out:]), tuple(prompts[:held_out]))


class Encoder:
    """From conversations to token ids, by the chat template of an engine's model; without one the contents are the
    prompt, one after another.
    """

    def __init__(self, engine: Engine) -> None:
        from pegboard.tools.chat.conversation import Interlocutor

        self._tokenizer = engine.tokenizer
        self._interlocutor = Interlocutor(engine) if engine.tokenizer.has_chat_template else None

    def ids(self, prompt: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids that ask for the next message."""
        if self._interlocutor is None:
            return self._tokenizer.encode("\n".join(content for _, content in prompt) + "\n")
        text = self._interlocutor.prompt([{"role": role, "content": content} for role, content in prompt])
        if not isinstance(text, str):
            raise PegboardError("train-draft: prompts with media are not supported")
        return self._tokenizer.encode(text, add_special_tokens=False)
