"""``pegboard bench offline``: the same workloads through an engine in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk, failure
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.media.inputs import MediaPrompt
from pegboard.tools.bench.apis import Prompt
from pegboard.tools.bench.files import Lines, has_messages, make_workload
from pegboard.tools.bench.images import chat_prompt
from pegboard.tools.bench.load import INTERRUPTED, TICK, Outcome, Progress, Watcher
from pegboard.tools.bench.records import STOPPED, Record
from pegboard.tools.bench.target import token_range_of
from pegboard.tools.bench.workloads import IMAGES, WARM_UP_RUN, Kind, Session, Shape, follow

_STEPS = ("prefill_steps", "decode_steps")
_SECONDS = {"schedule": "schedule_time", "forward": "forward_time", "results": "results_time"}
_ENCODES = "encoder_cache_capacity"
"""The figure that an engine has only where its model takes media."""


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """What the command line asks for."""

    workload: str = "random"
    shape: Shape = field(default_factory=Shape)
    file: Path | None = None
    prompt_kind: str = "auto"
    concurrency: int | None = None
    stream: bool = False
    """Take every token as it comes, so that there are latencies."""
    seed: int = 0
    repeat: int = 1
    warmup: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(slots=True)
class _Task:
    """A turn that is being answered."""

    session: Session
    record: Record
    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    text: str = ""


class OfflineBench:
    """Runs of one engine."""

    def __init__(self, engine: Engine, settings: OfflineSettings, lines: Lines | None) -> None:
        self._engine = engine
        self._settings = settings
        self._lines = lines
        kind = settings.prompt_kind
        if settings.workload == IMAGES or (lines is not None and has_messages(lines)):
            self._kind = Kind.MESSAGES
        else:
            self._kind = Kind.TOKENS if kind == "auto" else Kind(kind)
        self._tasks: dict[str, _Task] = {}
        self._outcome = Outcome(0)
        self._done = 0
        self._failed = 0
        self._preparing = 0.0
        """Seconds in which this run waited for media to be prepared."""

    def sessions(self, run: int, shape: Shape) -> list[Session]:
        """Return what is asked in one run."""
        ids = token_range_of(self._engine.info.vocab_size)
        name, lines = self._settings.workload, self._lines
        if run == WARM_UP_RUN and lines is not None:
            # A file's own prompts would be in the cache afterwards.
            name, lines = "random", None
        return make_workload(name, shape, self._kind, ids, self._settings.seed, lines).sessions(run)

    def run(
        self, sessions: Sequence[Session], watch: Watcher | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> tuple[Outcome, dict[str, Any]]:
        """Return one run; what came of it, and of its steps. `stopped` ends it after the step that is under way."""
        queue = deque(sessions)
        most = self._settings.concurrency or len(sessions)
        outcome = self._outcome = Outcome(sum(len(one.turns) for one in sessions))
        self._done = self._failed = 0
        self._preparing = 0.0
        runner = self._engine.built.runner
        runner.stage_times()
        before, cpu = self._engine.stats(), time.process_time()
        outcome.start = told = time.perf_counter()
        while (queue or self._tasks) and not outcome.stopped:
            while queue and len(self._tasks) < most:
                self._send(queue.popleft(), 0, [], 0)
            for chunk in self._engine.poll():
                self._take(chunk)
            if watch is not None and time.perf_counter() - told > TICK:
                told = time.perf_counter()
                watch(self._progress())
            if stopped():
                outcome.stopped = INTERRUPTED
        outcome.end = time.perf_counter()
        outcome.cpu_seconds = time.process_time() - cpu
        after = self._engine.stats()
        self._engine.abort(*self._tasks)
        for task in self._tasks.values():
            self._end(task.record, STOPPED)
        self._tasks.clear()
        found = step_figures(before, after, runner.stage_times(), outcome.duration, self._preparing)
        return outcome, found

    def _send(self, session: Session, number: int, so_far: Prompt, tokens: int, first: int | None = None) -> None:
        """Send the turn of this number; after `so_far`, of so many `tokens`, in the conversation of the record
        `first`.
        """
        turn = session.turns[number]
        known = None if turn.input_len is None else tokens + turn.input_len
        here = len(self._outcome.records)
        conversation = here if first is None else first
        record = Record(here, conversation, turn=number, input_len=known, output_len=turn.output_len, counts=[])
        self._outcome.records.append(record)
        prompt = so_far if number else turn.new
        sampling = SamplingParams(
            max_new_tokens=turn.output_len,
            temperature=self._settings.temperature,
            ignore_eos=self._settings.ignore_eos,
        )
        record.sent = record.due = time.perf_counter()
        try:
            request = self._request(prompt, sampling)
            rid = self._engine.submit(request)
        except InvalidRequest as error:
            self._end(record, error.message)
        else:
            if isinstance(request.prompt, MediaPrompt):
                self._preparing += time.perf_counter() - record.sent
            self._tasks[rid] = _Task(session, record, prompt)

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> GenerateRequest:
        stream = self._settings.stream
        if prompt and isinstance(prompt[0], dict):
            asked = chat_prompt(self._engine, prompt)  # type: ignore[arg-type]
            return GenerateRequest(prompt=asked, sampling=sampling, stream=stream, add_special_tokens=False)
        return GenerateRequest(prompt=prompt, sampling=sampling, stream=stream)  # type: ignore[arg-type]

    def _take(self, chunk: OutputChunk) -> None:
        task = self._tasks[chunk.rid]
        record = task.record
        if chunk.token_ids:
            record.times.append(time.perf_counter())
            assert record.counts is not None
            record.counts.append(len(chunk.token_ids))
            task.ids += chunk.token_ids
            task.text += chunk.text
        if chunk.finish_reason is None:
            return
        del self._tasks[chunk.rid]
        error = failure(chunk.finish_reason)
        record.prompt_tokens, record.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
        record.output_tokens, record.counted = len(task.ids), "usage"
        record.finish_reason = str(chunk.finish_reason.get("type", ""))
        self._end(record, "" if error is None else error.message)
        following = record.turn + 1
        if error is None and following < len(task.session.turns):
            answer = task.ids if self._kind is Kind.TOKENS else task.text
            prompt = follow(task.prompt, answer, task.session.turns[following].new)
            tokens = chunk.prompt_tokens + len(task.ids)
            self._send(task.session, following, prompt, tokens, record.conversation)

    def _end(self, record: Record, error: str) -> None:
        record.error, record.over = error, True
        record.end = time.perf_counter()
        self._failed += bool(error)
        self._done += not error

    def _progress(self) -> Progress:
        outcome = self._outcome
        tokens = sum(sum(one.counts or ()) for one in outcome.records)
        return Progress(outcome.wanted, self._done, self._failed, tokens, time.perf_counter() - outcome.start)


def step_figures(
    before: dict[str, Any], after: dict[str, Any], stages: dict[str, float], seconds: float, preparing: float = 0.0
) -> dict[str, Any]:
    """Of the steps between two looks at an engine: how many, where their time went (in seconds, as a share, and per
    step in milliseconds), and what the runner says of its own stages. A model that takes media has encodings besides,
    and may have waited for media to be prepared.
    """
    encodes = _ENCODES in after
    counted = (*_STEPS, "encode_steps") if encodes else _STEPS
    timed = {**_SECONDS, "encode": "encode_time"} if encodes else dict(_SECONDS)
    if after.get("draft_time"):
        timed["draft"] = "draft_time"
    found: dict[str, Any] = {name: after[name] - before[name] for name in counted}
    spent = {name: after[key] - before[key] for name, key in timed.items()}
    if preparing:
        spent["prepare"] = preparing
    spent["other"] = max(0.0, seconds - sum(spent.values()))
    steps = max(1, sum(found.values()))
    found["seconds"] = spent
    found["share"] = {name: value / seconds for name, value in spent.items()}
    found["ms_per_step"] = {name: value * 1000 / steps for name, value in spent.items()}
    found["forward_seconds"] = dict(stages)
    return found
