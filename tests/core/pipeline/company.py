"""Requests of test_company, drawn at random, and what each of them is to get: what it would get alone."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.media.api import MediaItem
from tests.core.pipeline.company_model import Context, FakePooler, hidden, kept_as, logprob, top
from tests.core.pipeline.harness import EOS, next_token
from tests.plugins.grammar.test_state import tokens_of
from tests.plugins.media.media_harness import Album, Prompt, seen

LETTERS = "abcde"
LONGEST = 40
"""Tokens of a prompt; with an output of 20 they fit into the smallest memory."""
Part = list[int] | tuple[int, int, int, int]
"""Of a prompt: words, or an item by its name, height, width and pieces."""


class Tokenizer:
    """Two letters a token, so that most stop strings come across tokens."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token % 5] + LETTERS[token // 5 % 5] for token in ids)

    def id_to_token(self, token_id: int) -> str | None:
        return self.decode([token_id])


def stop_in(text: str, begin: int, sampling: dict[str, Any]) -> str | None:
    """The stop that ends with a text, of which what is before `begin` does not count."""
    for stop in sorted(sampling.get("stop", ()), key=len, reverse=True):
        if text.endswith(stop, begin):
            return str(stop)
    for pattern in sampling.get("stop_regex", ()):
        if re.search(f"(?:{pattern})\\Z", text[begin:]):
            return str(pattern)
    return None


@dataclass
class Asked:
    """A request, and its oracles. `kept` is what the model keeps of its prompt, `delta` how far the positions of its
    output are from its tokens' indices.
    """

    rid: str
    ids: list[int]
    n: int
    kept: list[int]
    delta: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    script: list[int] | None = None
    logprob_start: int | None = None
    wants_logprobs: bool = False
    wants_hidden: bool = False
    embed: bool = False
    stream: bool = False
    brought: int | None = None
    """Its first token, where that comes from elsewhere."""
    broken: bool = False
    """Whether some of its media cannot be encoded."""
    media: Prompt | None = None

    @cached_property
    def tokens(self) -> list[int]:
        """All that it could get."""
        return self._whole[0]

    @cached_property
    def _whole(self) -> tuple[list[int], Context]:
        """These tokens, and what the model keeps of the prompt and of them."""
        out, kept = list[int](), list(self.kept)
        for i in range(self.n if self.script is None else min(self.n, len(self.script))):
            out.append(next_token(np.array(kept, np.int64)) if self.script is None else self.script[i])
            at = np.array([len(kept)])
            kept += kept_as(np.array(out[-1:]), np.stack([at + self.delta] * 3), at).tolist()
        return out, np.array(kept, np.int64)

    @cached_property
    def end(self) -> tuple[int, dict[str, Any]]:
        """How many tokens it gets, and why it ends."""
        if self.embed:
            return 0, {"type": "length"}
        text, begin = "", 0
        for count, token in enumerate(self.tokens, 1):
            if token in self.sampling.get("stop_token_ids", ()) or (token == EOS and not self.sampling["ignore_eos"]):
                return count, {"type": "stop", "matched": token}
            for char in Tokenizer().decode([token]):
                text += char
                matched = stop_in(text, begin, self.sampling)
                if matched is not None and count >= self.sampling.get("min_new_tokens", 0):
                    return count, {"type": "stop", "matched": matched}
                if matched is not None:
                    begin = len(text)
            if self.script is not None and count == len(self.script):
                return count, {"type": "stop"}
        return self.n, {"type": "length"}

    def logprobs(self, count: int) -> list[tuple[float, int, list[tuple[float, int]]]]:
        """Of the first `count` tokens."""
        tokens, whole = self._whole
        contexts = [whole[: len(self.kept) + i] for i in range(count)]
        found = [(logprob(one, token), token, [top(one)]) for one, token in zip(contexts, tokens, strict=False)]
        if self.brought is not None and found:
            found[0] = (-0.5, self.brought, [(-0.5, 3)])
        return found

    def prompt_logprobs(self) -> list[tuple[float | None, int, list[tuple[float, int]]]] | None:
        if self.logprob_start is None:
            return None
        whole = np.array(self.kept, np.int64)
        found: list[tuple[float | None, int, list[tuple[float, int]]]] = []
        for at in range(self.logprob_start, len(self.ids)):
            token, context = self.ids[at], whole[:at]
            found.append((logprob(context, token), token, [top(context)]) if at else (None, token, []))
        return found

    def hidden(self, count: int) -> list[float]:
        """The states that the first `count` tokens were drawn from, one after the other."""
        _, whole = self._whole
        return [number for i in range(count) for number in hidden(whole[: len(self.kept) + i])]


class Author:
    """Writes requests. Which features are played is drawn once: some games have few of them, and more of each."""

    def __init__(self, rng: random.Random, album: Album, pooler: FakePooler) -> None:
        self.rng, self.album, self.pooler = rng, album, pooler
        self.media, self.embeds, self.rows, self.stops, self.grammars, self.gates = (
            rng.choice([0.0, most / 2, most]) for most in (0.5, 0.4, 0.8, 0.5, 0.4, 0.9)
        )
        self.breaks = rng.random() < 0.2
        self.broken: set[bytes] = set()
        self.files: dict[str, list[str]] = {}
        self._prompts: list[list[Part]] = []

    def write(self, rid: str) -> Asked:
        """A request, but for how it comes."""
        rng = self.rng
        parts = self._parts()
        prompt = self._compose(rid, parts)
        asked = Asked(rid, prompt.ids, rng.randint(1, 20), self._kept(prompt), prompt.positions.delta)
        if prompt.media.items:
            asked.media = prompt
            asked.broken = any(item.digest in self.broken for item in prompt.media.items)
        elif rng.random() < self.embeds:
            asked.embed, asked.n = True, rng.choice([0, 5])  # of which it gets none
            return asked
        asked.stream = rng.random() < 0.4
        asked.sampling["ignore_eos"] = rng.random() < 0.7
        if rng.random() < self.grammars:
            asked.script = tokens_of(rng.randrange(50), rng.randint(1, 15))
            asked.sampling["grammar"] = Grammar("regex", f"tokens {' '.join(map(str, asked.script))}")
        if rng.random() < self.stops:
            self._stop(asked)
        if rng.random() < self.rows:
            asked.wants_hidden = rng.random() < 0.5
            asked.wants_logprobs = not asked.wants_hidden or rng.random() < 0.5
            if asked.wants_logprobs and rng.random() < 0.6:
                asked.logprob_start = rng.randrange(len(asked.ids))
        return asked

    def _stop(self, asked: Asked) -> None:
        rng, sampling = self.rng, asked.sampling
        kind = rng.choice(["ids", "strings", "expression"])
        if kind == "ids":
            sampling["stop_token_ids"] = tuple(rng.sample(range(251), 12))
            return
        if kind == "strings":
            sampling["stop"] = tuple("".join(rng.choices(LETTERS, k=rng.randint(2, 4))) for _ in range(3))
        else:
            sampling["stop_regex"] = (f"{rng.choice(LETTERS)}[{''.join(rng.sample(LETTERS, 2))}]+{rng.choice('ace')}",)
        if rng.random() < 0.3 and asked.script is None:
            sampling.update(ignore_eos=True, min_new_tokens=rng.randint(1, asked.n))

    def _parts(self) -> list[Part]:
        """New ones, often behind those of another prompt."""
        rng = self.rng
        parts: list[Part] = []
        if self._prompts and rng.random() < 0.5:
            parts += rng.choice(self._prompts)
        for _ in range(rng.randint(1, 3) if rng.random() < self.media else 0):
            parts += [self.album.words(rng.randint(0, 3)), (rng.randrange(6), rng.randint(1, 3), rng.randint(1, 3), 1)]
            if rng.random() < 0.2:
                name, height, width, _ = parts.pop()
                parts.append((name, height, width, 2))
        parts.append([rng.randrange(20) for _ in range(rng.randint(1, 30))])
        while sum(map(self._length, parts)) > LONGEST:
            if len(parts) == 1 or self._length(parts[-1]) > 10:
                del parts[-1][-1]  # type: ignore[union-attr]
            else:
                del parts[-2]
        self._prompts.append(parts)
        return parts

    @staticmethod
    def _length(part: Part) -> int:
        return len(part) if isinstance(part, list) else part[1] * part[2] * part[3]

    def _compose(self, rid: str, parts: list[Part]) -> Prompt:
        made: list[list[int] | MediaItem] = []
        for part in parts:
            made.append(part if isinstance(part, list) else self.album.item(*part))
            if isinstance(made[-1], MediaItem):
                self.files.setdefault(rid, []).append(made[-1].file)
                if self.breaks and not isinstance(part, list) and part[0] == 5:
                    self.broken.add(made[-1].digest)
        return self.album.prompt(*made)

    @staticmethod
    def _kept(prompt: Prompt) -> list[int]:
        kept = list(prompt.ids)
        for span in prompt.media.spans:
            digest = prompt.media.items[span.item].digest
            kept[span.start : span.start + span.count] = [seen(digest, span.piece, i) for i in range(span.count)]
        found: list[int] = kept_as(np.array(kept), prompt.positions.prompt, np.arange(len(kept))).tolist()
        return found

    def forget(self, rid: str) -> None:
        """A request has ended: its files go."""
        for file in self.files.pop(rid, ()):
            (self.album.directory / file).unlink(missing_ok=True)
