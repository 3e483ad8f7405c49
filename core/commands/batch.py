"""``pegboard generate --file``: a file of prompts, answered offline, that can be stopped and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Protocol

from pegboard.core.commands.output import write
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError

if TYPE_CHECKING:
    from pegboard.core.engine import Engine, GenerateOutput
    from pegboard.core.interfaces.client import GenerateRequest
    from pegboard.core.interfaces.sampling import SamplingParams

WINDOW = 512
"""Requests that are under way at most: enough for the largest batch, with others waiting behind it."""
TELL_EVERY = 10.0
"""Seconds between two lines about the progress, where there is no terminal."""
STOPPED = 130
"""Exit code of a run that was stopped, as shells have it."""
_SHOWN = 10

_KEYS = frozenset({"id", "prompt", "messages", "sampling_params", "custom_id", "method", "url", "body"})
_BODY = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "temperature": "temperature",
    "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "repetition_penalty": "repetition_penalty", "seed": "seed", "stop": "stop",
}  # fmt: skip
"""What of the body of a line in OpenAI's batch format counts, and what it is called here."""


class BadLine(Exception):
    """A line that is no request; the message says why."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file. `prompt` or `messages`; `params` are its own sampling parameters."""

    id: str
    index: int
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: Mapping[str, Any]


@dataclass(slots=True)
class Totals:
    """What a run has done."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        cached = f", {self.cached_tokens / self.prompt_tokens:.0%} of them cached" if self.prompt_tokens else ""
        failed = f", {self.errors} failed" if self.errors else ""
        return (
            f"{self.requests} requests{failed} in {seconds:.1f} s: {self.prompt_tokens} prompt tokens{cached}, "
            f"{self.new_tokens} new ones ({self.new_tokens / seconds:.1f} tok/s)"
        )


class Progress(Protocol):
    """Shows how far a run is."""

    def update(self, done: int, totals: Totals) -> None: ...


def parse_line(text: str, index: int) -> Line:
    """A line's request. Raises BadLine."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadLine("a line is a JSON object")
    if unknown := sorted(data.keys() - _KEYS):
        raise BadLine(f"unknown key {unknown[0]!r}; a line has {', '.join(sorted(_KEYS))}")
    if "body" in data:
        return _openai_line(data, index)
    return _line(data, index, data.get("id"), data.get("sampling_params", {}))


def _openai_line(data: dict[str, Any], index: int) -> Line:
    body = data["body"]
    if not isinstance(body, dict):
        raise BadLine("body is an object")
    if body.get("n", 1) != 1:
        raise BadLine("body.n: one answer per line")
    params = {_BODY[key]: value for key, value in body.items() if key in _BODY and value is not None}
    return _line(body, index, data.get("custom_id"), params)


def _line(data: Mapping[str, Any], index: int, name: Any, params: Any) -> Line:
    prompt, messages = data.get("prompt"), data.get("messages")
    if (prompt is None) == (messages is None):
        raise BadLine("one of prompt and messages is needed" if prompt is None else "prompt or messages, not both")
    if prompt is not None and not (
        (isinstance(prompt, str) and prompt)
        or (isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt))
    ):
        raise BadLine("prompt is a text or a list of token ids, and not empty")
    if messages is not None and not (
        isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
    ):
        raise BadLine("messages is a list of objects, and not empty")
    if name is not None and not (isinstance(name, (str, int)) and not isinstance(name, bool) and str(name)):
        raise BadLine("the id is a text or a number")
    if not isinstance(params, dict):
        raise BadLine("sampling_params is an object")
    return Line(str(index) if name is None else str(name), index, prompt, messages, params)


def make_params(defaults: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a line: its own over the defaults. Raises BadLine."""
    import msgspec

    from pegboard.core.interfaces.sampling import SamplingParams

    fields = {**msgspec.structs.asdict(defaults), **own}
    if unknown := sorted(own.keys() - msgspec.structs.asdict(defaults).keys()):
        raise BadLine(f"sampling_params.{unknown[0]} is unknown")
    for name in ("stop", "stop_regex"):
        if isinstance(fields[name], str):
            fields[name] = (fields[name],)
    try:
        params = msgspec.convert({**fields, "grammar": None}, SamplingParams)
        params.validate()
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise BadLine(f"sampling_params: {error}") from None
    if own.get("grammar") is not None:
        from pegboard.core.interfaces.grammar import Grammar

        try:
            params = msgspec.structs.replace(params, grammar=msgspec.convert(own["grammar"], Grammar))
        except msgspec.ValidationError as error:
            raise BadLine(f"sampling_params.grammar: {error}") from None
    return params


class Source:
    """The input file, line by line and as often as needed. Blank lines are passed over."""

    def __init__(self, path: Path) -> None:
        self.name = "stdin" if str(path) == "-" else str(path)
        self._spool: tempfile.SpooledTemporaryFile[bytes] | None = None
        self._path = path
        if str(path) == "-":
            # It is read twice: once to be checked, once to be answered.
            self._spool = tempfile.SpooledTemporaryFile(max_size=64 * 2**20)  # noqa: SIM115 - as long as the run
            shutil.copyfileobj(sys.stdin.buffer, self._spool)
        elif not path.is_file():
            raise PegboardError(f"--file: there is no {path}")

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """(line number from 1, text)."""
        stream: IO[bytes] = self._spool if self._spool is not None else self._path.open("rb")
        stream.seek(0)
        try:
            for number, raw in enumerate(stream, 1):
                text = raw.decode("utf-8", "replace").strip()
                if text:
                    yield number, text
        finally:
            if self._spool is None:
                stream.close()


def check(source: Source, defaults: SamplingParams, *, skip_bad: bool) -> tuple[int, dict[int, str]]:
    """How many requests there are, and what is wrong with which lines. Raises PegboardError for those, unless they are
    to be skipped, with the file's name and the line's number.
    """
    seen: dict[str, int] = {}
    bad: dict[int, str] = {}
    count = 0
    for index, (number, text) in enumerate(source):
        count += 1
        try:
            line = parse_line(text, index)
            make_params(defaults, line.params)
            if line.id in seen:
                raise BadLine(f"the id {line.id!r} is that of line {seen[line.id]}")
            seen[line.id] = number
        except BadLine as error:
            bad[number] = str(error)
    if bad and not skip_bad:
        shown = [f"  {source.name}:{number}: {why}" for number, why in list(bad.items())[:_SHOWN]]
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise PegboardError(
            f"{len(bad)} bad lines (--skip-bad-lines answers them with an error record):\n" + "\n".join(shown) + more
        )
    return count, bad


def open_output(path: Path, *, resume: bool, overwrite: bool) -> tuple[IO[str], set[str]]:
    """The output file, to be written on, and the ids that it has answers for. A last line that was cut off by a crash
    is dropped. Raises PegboardError where there is something that nobody said what to do with.
    """
    done: set[str] = set()
    if resume and overwrite:
        raise PegboardError("--resume and --overwrite exclude each other")
    if path.exists() and path.stat().st_size and not overwrite:
        if not resume:
            raise PegboardError(f"--output: {path} exists; --resume continues it, --overwrite starts anew")
        whole = 0
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                try:
                    record = json.loads(raw) if raw.endswith(b"\n") else None
                except ValueError:
                    raise PegboardError(f"--resume: {path}:{number} is no record of such a run") from None
                if record is None:
                    break
                if not isinstance(record, dict) or not isinstance(record.get("id"), str):
                    raise PegboardError(f"--resume: {path}:{number} is no record of such a run")
                done.add(record["id"])
                whole += len(raw)
        os.truncate(path, whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w" if overwrite else "a", encoding="utf-8"), done


class Batch:
    """One run over a file."""

    def __init__(
        self,
        engine: Engine,
        defaults: SamplingParams,
        *,
        chat: bool,
        system: str,
        bad: Mapping[int, str],
        skip: set[str],
    ) -> None:
        self.totals = Totals()
        self.stopped = False
        self._engine = engine
        self._defaults = defaults
        self._chat = chat
        self._system = system
        self._bad = bad
        self._skip = skip
        self._lines: dict[int, Line] = {}

    def run(self, source: Source, write_record: Callable[[dict[str, Any]], None], progress: Progress) -> None:
        """Answer all lines; `write_record` gets one record each, as they finish."""
        done = len(self._skip)
        sent: list[Line] = []

        def requests() -> Iterator[GenerateRequest]:
            for index, (number, text) in enumerate(source):
                if number in self._bad:
                    if str(index) not in self._skip:
                        write_record(_failure(str(index), index, self._bad[number], "bad_line", 400))
                        self.totals.requests += 1
                        self.totals.errors += 1
                    continue
                line = parse_line(text, index)
                if line.id in self._skip:
                    continue
                request = self._request(line, write_record)
                if request is not None:
                    sent.append(line)
                    yield request

        for at, answer in self._engine.map(requests(), window=WINDOW, stop=lambda: self.stopped):
            line = sent[at]
            write_record(self._record(line, answer))
            sent[at] = None  # type: ignore[call-overload]  # a long file is not kept in memory
            done += 1
            progress.update(done, self.totals)

    def _request(self, line: Line, write_record: Callable[[dict[str, Any]], None]) -> GenerateRequest | None:
        from pegboard.core.interfaces.client import GenerateRequest

        messages = line.messages
        if messages is None and self._chat and isinstance(line.prompt, str):
            messages = [{"role": "user", "content": line.prompt}]
        params = make_params(self._defaults, line.params)
        if messages is None:
            assert line.prompt is not None
            return GenerateRequest(prompt=line.prompt, sampling=params)
        if self._system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text = self._engine.tokenizer.apply_chat_template(messages)
        except InvalidRequest as error:
            write_record(self._record(line, error))
            return None
        return GenerateRequest(prompt=text, sampling=params, add_special_tokens=False)

    def _record(self, line: Line, answer: GenerateOutput | InvalidRequest) -> dict[str, Any]:
        totals = self.totals
        totals.requests += 1
        if isinstance(answer, InvalidRequest):
            totals.errors += 1
            return _failure(line.id, line.index, answer.message, answer.code, answer.status, answer.param)
        totals.prompt_tokens += answer.prompt_tokens
        totals.cached_tokens += answer.cached_tokens
        totals.new_tokens += len(answer.token_ids)
        return {
            "id": line.id,
            "index": line.index,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": len(answer.token_ids),
                "cached_tokens": answer.cached_tokens,
            },
        }


def _failure(name: str, index: int, message: str, code: str, status: int, param: str | None = None) -> dict[str, Any]:
    error = {"message": message, "code": code, "param": param, "status": status}
    return {"id": name, "index": index, "text": None, "error": error}


class _Lines:
    """Progress without a terminal: a line now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told = time.monotonic()

    def update(self, done: int, totals: Totals) -> None:
        if time.monotonic() - self._told >= TELL_EVERY:
            self._told = time.monotonic()
            sys.stderr.write(f"{done} of {self._total}: {totals}\n")
            sys.stderr.flush()


class _Bar:
    """Progress on a terminal."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def update(self, done: int, totals: Totals) -> None:
        seconds = max(time.monotonic() - totals.started, 1e-9)
        self._bar.update(self._task, completed=done, speed=f"{totals.new_tokens / seconds:.0f} tok/s")


@contextlib.contextmanager
def shown(total: int, done: int) -> Iterator[Progress]:
    """The progress of a run over `total` lines, `done` of which were answered before."""
    if not sys.stderr.isatty():
        yield _Lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task("", total=total, completed=done, speed=""))


@contextlib.contextmanager
def stoppable(batch: Batch) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after the step that is under way; a second one ends it the hard way."""

    def stop(number: int, frame: FrameType | None) -> None:
        if batch.stopped:
            raise KeyboardInterrupt
        batch.stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_batch(
    make_engine: Callable[[], Engine],
    file: Path,
    output: Path,
    defaults: SamplingParams,
    *,
    chat: bool,
    system: str,
    resume: bool,
    overwrite: bool,
    skip_bad: bool,
) -> int:
    """The whole command, from checking the file to the last line; the exit code."""
    source = Source(file)
    total, bad = check(source, defaults, skip_bad=skip_bad)
    stream, skip = open_output(output, resume=resume, overwrite=overwrite)
    with stream:
        if total and len(skip) >= total:
            write(f"all {total} requests of {source.name} are answered in {output}")
            return 0

        def write_record(record: dict[str, Any]) -> None:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            stream.flush()

        with make_engine() as engine:
            batch = Batch(engine, defaults, chat=chat, system=system, bad=bad, skip=skip)
            with stoppable(batch), shown(total, len(skip)) as progress:
                batch.run(source, write_record, progress)
        os.fsync(stream.fileno())
    write(str(batch.totals))
    if batch.stopped:
        left = total - len(skip) - batch.totals.requests
        write(f"stopped with {left} requests left; run the same with --resume to go on")
        return STOPPED
    return 1 if batch.totals.errors else 0
