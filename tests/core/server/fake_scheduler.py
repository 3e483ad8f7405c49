"""A scheduler without a model, for servers in tests: imported by the scheduler process of such a server only.

It gives every request the token of "a" once per step. What a prompt begins with makes it misbehave.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from pegboard.core.interfaces.client import ModelInfo
from pegboard.core.interfaces.errors import ModelError, Temporary
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    FromScheduler,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
    ToScheduler,
)
from pegboard.core.pipeline.arrivals import QueueBounds
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.media.api import RequestMedia
from pegboard.plugins.media.work import NAME

DIES, HANGS, RAISES, RAVES = 7, 8, 9, 10
STEP = 0.002


class Unbounded(QueueBounds):
    """Bounds that take all that comes, whatever is set."""

    def set_open(self, requests: int, fills: int) -> None:
        pass


class FakeScheduler:
    def __init__(self, token: int) -> None:
        self.token = token
        self.running: dict[str, tuple[TokenizedRequest, int]] = {}
        self.ended: list[TokenOutput] = []
        self.aborted = 0
        self.messages = 0
        """How many messages have brought requests."""

    @property
    def idle(self) -> bool:
        return not self.running and not self.ended

    @property
    def resting(self) -> bool:
        return False

    @property
    def busy(self) -> bool:
        return False

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        replies: list[FromScheduler] = []
        for message in messages:
            if isinstance(message, (TokenizedRequest, TokenizedBatch)):
                self.messages += 1
                for one in message.requests if isinstance(message, TokenizedBatch) else [message]:
                    self.running[one.rid] = (one, 0)
                    replies.append(Accepted(rid=one.rid))
            elif isinstance(message, AbortRequest):
                for rid in list(self.running) if message.all_requests else [message.rid]:
                    if self.running.pop(rid, None) is not None:
                        self.aborted += 1
                        self.ended.append(TokenOutput(rid=rid, token_ids=[], finish_reason={"type": "abort"}))
            elif isinstance(message, ControlRequest):
                counters = {
                    "running_requests": len(self.running),
                    "aborted": self.aborted,
                    "messages": self.messages,
                    "pid": os.getpid(),
                }
                replies.append(ControlReply(call_id=message.call_id, ok=not self.running, payload=counters))
        return replies

    @property
    def bounds(self) -> QueueBounds:
        return Unbounded(places=1, memory=1, requests=None, tokens=None)

    def step(self) -> list[TokenOutput]:
        if self.running:
            time.sleep(STEP)
        outputs, self.ended = self.ended, []
        for rid, (request, done) in list(self.running.items()):
            first = request.prompt[0]
            if first == DIES:
                os._exit(5)
            if first == HANGS:
                time.sleep(1000)
            if first == RAVES:
                outputs.append(TokenOutput(rid=None, token_ids=[]))  # type: ignore[arg-type]  # on purpose
            if first == RAISES:
                raise RuntimeError("the scheduler has a bug")
            done += 1
            last = done >= (request.sampling.max_new_tokens or 0)
            finish: dict[str, Any] | None = {"type": "length"} if last else None
            outputs.append(
                TokenOutput(
                    rid=rid, token_ids=[self.token], finish_reason=finish, completion_tokens=done, prompt_tokens=1
                )
            )
            self.running[rid] = (request, done)
            if last:
                del self.running[rid]
        return outputs


class FullScheduler(FakeScheduler):
    """Whose queue is full."""

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        replies = super().receive(messages)
        self.running.clear()
        return [
            Rejected(rid=one.rid, status=503, code="queue_full", message="3 requests are waiting, try again later")
            if isinstance(one, Accepted)
            else one
            for one in replies
        ]


class MediaScheduler(FakeScheduler):
    """Takes media, whose files must be there from the first word of a request to its last."""

    directory = Path()

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        replies = super().receive(messages)
        self._look()
        return replies

    def step(self) -> list[TokenOutput]:
        outputs = super().step()
        self._look()
        return outputs

    def _look(self) -> None:
        for request, _ in self.running.values():
            stated = request.features.get(NAME)
            for item in () if stated is None else msgspec.msgpack.decode(stated, type=RequestMedia).items:
                size = (self.directory / item.file).stat().st_size
                assert size == math.prod(item.shape), "a file changes while its request runs"


def build_media(resolved: Any, scratch: Path) -> Any:
    built = build(resolved, scratch, MediaScheduler)
    built.info = dataclasses.replace(built.info, vocab_size=328, features=("media.image",))
    built.scheduler.directory = scratch
    return built


def build(resolved: Any, scratch: Path, kind: type[FakeScheduler] = FakeScheduler) -> Any:
    from pegboard.toolkit.text.tokenizer import Tokenizer

    path = Path(resolved.engine.model.path)
    info = ModelInfo(
        served_name="fake", path=str(path), architecture="Fake", max_context_len=100_000, vocab_size=320,
        max_total_tokens=0, dtype="float32", version="0",
    )  # fmt: skip
    token = Tokenizer.from_directory(path).encode("a")[0]
    return SimpleNamespace(
        scheduler=kind(token), info=info, directory=path, hooks=Hooks(), view=None, close=lambda: None,
        prepare_memory=lambda seconds: None,
    )  # fmt: skip


def build_nothing(resolved: Any, scratch: Path) -> Any:
    raise ModelError("this model is from another planet; choose one from here")


def build_no_cluster(resolved: Any, scratch: Path) -> Any:
    raise Temporary("the cluster is not up")


def build_badly(resolved: Any, scratch: Path) -> Any:
    raise ZeroDivisionError("nobody expected this")


def build_and_die(resolved: Any, scratch: Path) -> Any:
    os._exit(3)


def build_full(resolved: Any, scratch: Path) -> Any:
    return build(resolved, scratch, FullScheduler)


def build_when_told(resolved: Any, scratch: Path) -> Any:
    go = Path(os.environ["TMPDIR"], "go")
    while not go.exists():
        time.sleep(0.02)
    return build(resolved, scratch)
