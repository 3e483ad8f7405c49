"""Workloads from files: prompts, conversations, traces; a JSON object per line, or one list of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.apis import Prompt
from pegboard.tools.bench.workloads import WORKLOADS, Kind, Session, Shape, Source, Turn, Workload
from pegboard.tools.bench.workloads import source as source_of

if TYPE_CHECKING:
    from numpy.random import Generator

FROM_FILE = "file"
"""This workload's name."""
BLOCK = 512
"""Tokens that one of a trace's `hash_ids` stands for."""
TOKENS_PER_WORD = 4 / 3
"""Of English, about: how long an answer is that a file has as text."""

_LENGTHS = ("output_len", "output_length", "max_tokens", "max_completion_tokens", "max_new_tokens")
_HUMANS = ("human", "user")


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a file, with their lines' numbers (places, in a list). Raises PegboardError."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise PegboardError(f"--file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PegboardError(f"--file: {path} is not UTF-8 text") from None
    found: list[tuple[int, Any]] = []
    if text.lstrip().startswith("["):
        try:
            found = list(enumerate(json.loads(text), 1))
        except ValueError as error:
            raise PegboardError(f"--file: {path} is not JSON: {error}") from None
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    found.append((number, json.loads(line)))
                except ValueError as error:
                    raise PegboardError(f"--file: {path}:{number}: this is not JSON: {error}") from None
    for number, said in found:
        if not isinstance(said, dict):
            raise PegboardError(f"--file: {path}:{number}: this is not a JSON object")
    if not found:
        raise PegboardError(f"--file: {path} has no requests in it")
    return found


def has_messages(lines: list[tuple[int, dict[str, Any]]]) -> bool:
    """Return whether these are requests for a chat."""
    said = lines[0][1]
    return "messages" in said.get("body", said)


Lines = list[tuple[int, dict[str, Any]]]


class FileWorkload(Workload):
    """The requests of a file, in its order. Where there are more to be sent than it has, it begins anew."""

    lines: Lines = []

    def _make(self, random: Generator, source: Source) -> Iterator[Session]:
        found = [self._session(number, said) for number, said in self.lines[: self.shape.requests]]
        for index in range(self.shape.requests):
            yield found[index % len(found)]

    def _session(self, number: int, said: dict[str, Any]) -> Session:
        try:
            turn = self._read(said, number)
            at = said.get("timestamp")
            return Session([turn], None if at is None else float(at))
        except PegboardError as error:
            raise PegboardError(f"--file: line {number}: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise PegboardError(f"--file: line {number}: {type(error).__name__}: {error}") from None

    def _read(self, said: dict[str, Any], number: int) -> Turn:
        body = said.get("body", said)
        sampling = body.get("sampling_params") or {}
        given = next((values[name] for values in (body, sampling) for name in _LENGTHS if values.get(name)), None)
        output_len = self.shape.output_len if given is None else int(given)
        if output_len < 1:
            raise PegboardError(f"an answer of {output_len} tokens is none")
        if "hash_ids" in body or "input_length" in body:
            return self._traced(body, output_len, number)
        if "conversations" in body:
            prompt, answer = _sharegpt(body["conversations"])
            if given is None and answer:
                output_len = max(1, round(len(answer.split()) * TOKENS_PER_WORD))
            return Turn(self._fit(prompt), output_len)
        for key in ("prompt", "messages", "text", "input_ids"):
            if key in body:
                fitting = self._fit(body[key])
                return Turn(fitting, output_len, len(fitting) if isinstance(fitting[0], int) else None)
        raise PegboardError("there is no prompt, no messages, no conversations and no input_length")

    def _fit(self, prompt: Any) -> Prompt:
        """Return the prompt as the server is asked."""
        if not prompt:
            raise PegboardError("the prompt is empty")
        if self.kind is Kind.MESSAGES:
            if isinstance(prompt, str):
                return [{"role": "user", "content": prompt}]
            if isinstance(prompt[0], dict):
                return list(prompt)
            raise PegboardError("token ids are no messages; take an --api that continues prompts")
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], dict):
            raise PegboardError("these are messages; take an --api that has chats")
        if not all(isinstance(one, int) for one in prompt):
            raise PegboardError("a prompt is text, a list of token ids, or a list of messages")
        return list(prompt)

    def _traced(self, said: dict[str, Any], output_len: int, number: int) -> Turn:
        """Return tokens that are equal where the trace's ids are; what no id covers is the line's own."""
        length, ids = max(1, int(said["input_length"])), [int(one) for one in said.get("hash_ids", ())]
        kind = Kind.TOKENS if self.kind is Kind.TOKENS else Kind.TEXT
        prompt: Any = [] if kind is Kind.TOKENS else ""
        left = length
        for count, seed in [*((BLOCK, (1, one)) for one in ids), (length, (2, number))]:
            count = min(count, left)
            if count > 0:
                prompt += source_of(kind, np.random.default_rng((self.seed, *seed)), self.token_range).draw(count)
                left -= count
        return Turn(self._fit(prompt), output_len, length)


def make_workload(
    name: str, shape: Shape, kind: Kind, token_range: tuple[int, int], seed: int, lines: Lines | None = None
) -> Workload:
    """Return the workload of this name; that of a file's lines where there are any."""
    if lines is None:
        return WORKLOADS[name](shape, kind, token_range, seed)
    made = FileWorkload(shape, kind, token_range, seed)
    made.lines = lines
    return made


def _sharegpt(said: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the first question, and the answer to it."""
    first = next((index for index, one in enumerate(said) if one["from"] in _HUMANS), None)
    if first is None:
        raise PegboardError("a conversation without a user's message")
    answer = said[first + 1]["value"] if first + 1 < len(said) else ""
    return str(said[first]["value"]), str(answer)
