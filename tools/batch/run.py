"""The run of `pegboard generate --file`: lines in, answers out, with the engine's queue always full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest, failure
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.tools.batch.lines import BadLine, Line
from pegboard.tools.chat.conversation import Interlocutor

if TYPE_CHECKING:
    from pegboard.toolkit.chat.tool_calls import ChatStream
    from pegboard.tools.batch.output import Output

TRIES = 5
"""How often a request is sent that the engine has no room for (503) while others are under way."""
AHEAD = 4
"""With answers in order: how many windows of requests may be taken from the file after the first unwritten one."""


@dataclass(slots=True)
class Totals:
    """What a run has done so far, apart from what earlier runs did."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return max((self.ended or time.monotonic()) - self.began, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens / self.prompt_tokens:.0%} cached)" if self.prompt_tokens else ""
        failed = f", {self.errors} failed" if self.errors else ""
        requests = "1 request" if self.requests == 1 else f"{self.requests} requests"
        tokens = f"{self.prompt_tokens} tokens in{cached}, {self.completion_tokens} out"
        return f"{requests}{failed}, {tokens}, {self.seconds:.1f} s, {self.completion_tokens / self.seconds:.1f} tok/s"


class Watcher(Protocol):
    """Is told how far a run is, often. `generated` are tokens, those of unfinished answers included."""

    def __call__(self, totals: Totals, generated: int) -> None: ...


@dataclass(slots=True)
class _Task:
    """A line that is being answered."""

    line: Line
    answer: GenerateOutput
    reader: ChatStream | None
    request: GenerateRequest
    tries: int = 0


class Run:
    """One run of an engine over lines. Every line becomes one record of `output`.

    At most `window` requests are under way at once, and no more are in memory: the others stay in the file until there
    is room. With `in_order` records come in the order of the lines; a little more may be in memory then.
    """

    def __init__(
        self, engine: Engine, lines: Iterator[Line | BadLine], output: Output, *, window: int, in_order: bool = False
    ) -> None:
        self.totals = Totals()
        self.written = 0
        """Records that are in the output; in order, a stopped run has answers that are not."""
        self._engine = engine
        self._lines = lines
        self._output = output
        self._window = window
        self._in_order = in_order
        self._interlocutor: Interlocutor | None = None
        self._tasks: dict[str, _Task] = {}
        self._again: deque[_Task] = deque()
        self._full = False
        """Whether the engine has refused one for want of room since it last finished one."""
        self._order: deque[int] = deque()
        """With `in_order`: indices of lines that were taken and are not written."""
        self._unwritten: dict[int, dict[str, Any]] = {}

    def go(self, stopped: Callable[[], bool], watcher: Watcher) -> None:
        """Answer until the lines end, or until `stopped`: then what is under way is aborted, and not written."""
        try:
            while not stopped():
                self._fill()
                if not self._tasks:
                    return
                self._poll()
                watcher(self.totals, self._engine.built.scheduler.counters.generated_tokens)
        finally:
            self.totals.ended = time.monotonic()
            self._engine.abort(*self._tasks)

    # ---- in -------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while len(self._tasks) < self._window and not self._full:
            if self._again:
                self._send(self._again.popleft())
                continue
            if self._in_order and len(self._order) >= AHEAD * self._window:
                return
            line = next(self._lines, None)
            if line is None:
                return
            if line.index in self._output.done:
                continue
            if self._in_order:
                self._order.append(line.index)
            if isinstance(line, BadLine):
                problem = InvalidRequest(line.problem, code="bad_line")
                self._write(line, _failed(line, problem))
                continue
            try:
                task = self._task(line)
            except InvalidRequest as error:
                self._write(line, _failed(line, error))
                continue
            self._send(task)

    def _task(self, line: Line) -> _Task:
        if not line.messages:
            asked = GenerateRequest(prompt=line.prompt, sampling=line.sampling, model=line.model)
            return _Task(line, GenerateOutput(""), None, asked)
        if self._interlocutor is None:
            self._interlocutor = Interlocutor(self._engine)
        prompt = self._interlocutor.prompt(line.messages)
        sampling = self._interlocutor.sampling(line.sampling)
        request = GenerateRequest(prompt=prompt, sampling=sampling, add_special_tokens=False, model=line.model)
        return _Task(line, GenerateOutput(""), self._interlocutor.reader(prompt, sampling), request)

    def _send(self, task: _Task) -> None:
        try:
            rid = self._engine.submit(task.request)
        except InvalidRequest as error:
            self._refused(task, error)
        else:
            self._tasks[rid] = task

    def _refused(self, task: _Task, error: InvalidRequest) -> None:
        """Its turn comes again where others take the room that it needs."""
        task.tries += 1
        if error.status == 503 and self._tasks and task.tries < TRIES:
            task.answer = GenerateOutput("")
            self._again.append(task)
            self._full = True
            return
        self._write(task.line, _failed(task.line, error))

    # ---- out ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        for chunk in self._engine.poll():
            task = self._tasks[chunk.rid]
            task.answer.add(chunk)
            if chunk.finish_reason is None:
                continue
            del self._tasks[chunk.rid]
            self._full = False
            error = failure(chunk.finish_reason)
            if error is not None:
                self._refused(task, error)
            else:
                self._count(task.answer)
                self._write(task.line, _answered(task))

    def _count(self, answer: GenerateOutput) -> None:
        self.totals.prompt_tokens += answer.prompt_tokens
        self.totals.cached_tokens += answer.cached_tokens
        self.totals.completion_tokens += len(answer.token_ids)

    def _write(self, line: Line | BadLine, record: dict[str, Any]) -> None:
        self.totals.requests += 1
        self.totals.errors += "error" in record
        record["digest"] = line.digest
        self._unwritten[line.index] = record
        if not self._in_order:
            self._order.append(line.index)
        while self._order and self._order[0] in self._unwritten:
            self._output.write(self._unwritten.pop(self._order.popleft()))
            self.written += 1


def _answered(task: _Task) -> dict[str, Any]:
    answer, line = task.answer, task.line
    record: dict[str, Any] = {"id": line.id, "index": line.index, "text": answer.text}
    if task.reader is not None:
        said = task.reader.collect(answer.text)
        record["text"] = said.content
        if said.reasoning:
            record["reasoning_content"] = said.reasoning
    record["finish_reason"] = answer.finish_reason["type"]
    if answer.finish_reason.get("matched") is not None:
        record["matched_stop"] = answer.finish_reason["matched"]
    record["usage"] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": answer.cached_tokens,
    }
    return record


def _failed(line: Line | BadLine, error: InvalidRequest) -> dict[str, Any]:
    problem = {"message": error.message, "code": error.code, "param": error.param}
    return {"id": line.id, "index": line.index, "error": problem}
