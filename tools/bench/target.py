"""The server that is measured: what it is, how it wants to be asked, and what it says of its cache."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.apis import APIS, Api, Prompt, Wanted, error_text
from pegboard.tools.bench.connection import HttpClient, RequestFailed
from pegboard.tools.bench.records import Record
from pegboard.tools.bench.workloads import Kind, source

AUTO = "auto"
TOKEN_RANGE = (1000, 10_000)
"""Ids that every vocabulary of today has, and none of them means anything special."""
WAIT_SECONDS = 0.5
"""Between two looks at a server that is not ready."""

_CACHE_COUNTERS = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
    ("pegboard_cached_tokens_total", "pegboard_prompt_tokens_total"),
)
"""Metrics that count tokens of prompts, those found in the cache and all."""


def token_range_of(vocab_size: int | None) -> tuple[int, int]:
    """Return the ids from which prompts are drawn; fewer where a vocabulary is small."""
    low, high = TOKEN_RANGE
    if vocab_size is None or vocab_size > high:
        return low, high
    return vocab_size // 10, max(vocab_size // 10 + 1, vocab_size * 9 // 10)


@dataclass(slots=True)
class Target:
    """A server that has answered, and how to ask it."""

    client: HttpClient
    api: Api
    kind: Kind
    wanted: Wanted
    about: dict[str, Any] = field(default_factory=dict)
    """What it says of itself."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about these figures."""
    vocab_size: int | None = None

    @property
    def token_range(self) -> tuple[int, int]:
        """Ids to draw prompts from: the same ones for every server, if its vocabulary has them."""
        return token_range_of(self.vocab_size)

    async def ask(self, prompt: Prompt, output_len: int) -> Record:
        """Return one request. Raises RequestFailed."""
        record = Record(0, output_len=output_len)
        reader = self.api.reader(record)
        body = self.api.encode(prompt, output_len, self.wanted)
        record.sent = time.perf_counter()
        await self.client.send(self.client.request("POST", self.api.path, body), reader)
        reader.finish()
        return record

    async def cache_counters(self) -> tuple[float, float] | None:
        """Return tokens found in the prefix cache, and tokens of prompts, since the server began; None where it tells
        no such thing.
        """
        try:
            status, _, data = await self.client.whole("GET", "/metrics")
        except RequestFailed:
            return None
        if status != 200:
            return None
        text = data.decode("utf-8", "replace")
        for hits, queries in _CACHE_COUNTERS:
            found = _metric(text, hits), _metric(text, queries)
            if found[0] is not None and found[1] is not None:
                return found[0], found[1]
        return None


def _metric(text: str, name: str) -> float | None:
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", text, re.MULTILINE)
    return sum(map(float, values)) if values else None


async def find_target(
    client: HttpClient,
    *,
    api: str,
    kind: str,
    wanted: Wanted,
    messages: bool,
    answers: bool,
    wait: float,
    waiting: Callable[[], AbstractContextManager[Any]],
) -> Target:
    """Look at the server and ask it something short, in the way that the run will. `api` and `kind` may be `auto`;
    `messages` says that the workload has messages, and `answers` that prompts hold earlier answers. Raises
    PegboardError where it cannot be measured.
    """
    models = await _models(client, wait, waiting)
    about = await _about(client)
    if models is not None:
        about["models"] = models
    chosen = _choose(api, models, messages)
    if not wanted.model:
        wanted = replace(wanted, model=models[0] if models else "")
    kinds = [Kind(one) for one in chosen.kinds]
    if answers and not chosen.tells_ids:
        # Answers are text here.
        kinds = [one for one in kinds if one is not Kind.TOKENS]
    if kind == Kind.TEXT and Kind.MESSAGES in kinds:
        kind = Kind.MESSAGES
    if kind != AUTO and kind not in kinds:
        raise PegboardError(
            f"--prompt-kind: with --api {chosen.name} this workload has {' or '.join(kinds)}, and no {kind}"
        )
    target = Target(client, chosen, Kind(kind) if kind != AUTO else kinds[0], wanted, about)
    target.vocab_size = about.get("vocab_size")
    await _try(target, kinds if kind == AUTO else [Kind(kind)])
    return target


def _choose(api: str, models: list[str] | None, messages: bool) -> Api:
    if api != AUTO:
        return APIS[api]
    if models is None:
        return next(one for one in APIS.values() if one.tells_ids)
    return next(one for one in APIS.values() if not one.tells_ids and ("messages" in one.kinds) == messages)


async def _models(
    client: HttpClient, wait: float, waiting: Callable[[], AbstractContextManager[Any]]
) -> list[str] | None:
    """Return what the server offers; None where it has no OpenAI API. One that is starting is waited for."""
    deadline = time.monotonic() + wait
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count():
            try:
                status, _, data = await client.whole("GET", "/v1/models")
                problem = f"{client.address}/v1/models answers with status {status}: {error_text(data)}"
            except RequestFailed as error:
                status, problem = 0, str(error)
            if status not in (0, 503):
                break
            if time.monotonic() >= deadline:
                hint = "start a server, or mend --url" if status == 0 else "it is starting or stopping"
                raise PegboardError(f"{problem}; {hint} (--wait SECONDS waits for it)")
            if not attempt:
                stack.enter_context(waiting())
            await asyncio.sleep(WAIT_SECONDS)
    if status in (401, 403):
        raise PegboardError(f"{problem} (--api-key-file, or PEGBOARD_API_KEY in the environment)")
    if status == 404:
        return None
    try:
        found = msgspec.json.decode(data)["data"]
        return [str(one["id"]) for one in found]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None


async def _about(client: HttpClient) -> dict[str, Any]:
    """Return what the server says of itself, where it does."""
    found: dict[str, Any] = {}
    for path in ("/version", "/model_info"):
        try:
            status, headers, data = await client.whole("GET", path)
        except RequestFailed:
            continue
        if "server" in headers:
            found["server"] = headers["server"]
        if status == 200:
            try:
                said = msgspec.json.decode(data)
            except msgspec.MsgspecError:
                continue
            if isinstance(said, dict):
                found |= {key: value for key, value in said.items() if isinstance(value, (str, int, float, bool))}
    return found


async def _try(target: Target, kinds: list[Kind]) -> None:
    """Leave out what the server refuses, and say so."""
    import numpy as np

    problem = ""
    for target.kind in kinds:
        prompt = source(target.kind, np.random.default_rng(), target.token_range).draw(8)
        for _ in range(3):
            try:
                record = await target.ask(prompt, 4)
            except RequestFailed as error:
                problem = problem or str(error)
                if not _leave_out(target, str(error)):
                    break
            else:
                if target.kind is not kinds[0]:
                    target.notes.append(f"the server takes no {kinds[0]} as prompts, so these are {target.kind}")
                _note_counts(target, record)
                return
    raise PegboardError(f"{target.client.address}{target.api.path} refuses a first, short request: {problem}")


def _leave_out(target: Target, problem: str) -> bool:
    wanted = target.wanted
    if "ignore_eos" in problem and wanted.ignore_eos:
        target.wanted = replace(wanted, ignore_eos=False)
        target.notes.append("the server does not know ignore_eos: answers may end before their length")
    elif "stream_options" in problem and wanted.stream_usage:
        target.wanted = replace(wanted, stream_usage=False)
    else:
        return False
    return True


def _note_counts(target: Target, record: Record) -> None:
    if record.counted == "usage":
        return
    target.notes.append(
        "the server does not count tokens in streams: an answer that ended for its length has as many as were asked "
        "for, another one as many as it had pieces; input tokens are those of the workload"
    )
