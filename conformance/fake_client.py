"""An engine client without an engine: a scripted answer, and on demand a refusal, a failure, or silence."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pegboard.conformance.rig.fake_media import FakeMedia, LaidOut
from pegboard.conformance.rig.loop_watch import RENDER, TOKENIZE, caller, on_loop
from pegboard.core.interfaces.client import (
    AnnotatedPrompt,
    Embedding,
    EmbedRequest,
    EngineClient,
    GenerateRequest,
    Logprob,
    ModelInfo,
    OutputChunk,
    OutputStream,
)
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaProcessor
from pegboard.toolkit.media.inputs import MediaPrompt
from pegboard.toolkit.media.service import MediaService
from pegboard.toolkit.text.encoding import check_length

SCRIPT = ("Once upon", " a midnight", " dreary.")

FAILURE = "the fake engine failed on purpose"

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The fake model's chat template."""

Script = Sequence[str] | Callable[[GenerateRequest, int], Sequence[str]]
"""The pieces of every answer, or what makes those of one request of it and its number."""

MEDIA_BODY = 64 * 2**20
"""Bytes of a body with media, as `media.max_body_bytes` has them by default."""
LONG = 256
"""Characters or tokens from which on the fake tokenizer notes that they hold up an event loop."""


class FakeTokenizer:
    """One token per character; a template that writes ``role: content`` lines. Notes calls that block an event loop."""

    vocab_size = 0x110000
    eos_token_ids = frozenset({3})
    special_ids = frozenset({3})

    def __init__(self, *, has_chat_template: bool = True, template: str = TEMPLATE) -> None:
        self.has_chat_template = has_chat_template
        self.chat_templates = {"default": template} if has_chat_template else {}
        self.named_tokens = {"eos_token": chr(3)}
        self.rendered_on_loop = 0
        """How often a chat was rendered in a thread that runs an event loop."""
        self.blocking: list[str] = []
        """What held up an event loop, where, and what to use instead."""

    def id_to_token(self, token_id: int) -> str | None:
        return chr(token_id) if 0 <= token_id < self.vocab_size else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._note(len(text) >= LONG, "tokenizer.encode of a long text", TOKENIZE)
        return [ord(char) for char in text]

    def encode_literal(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._note(len(ids) >= LONG, "tokenizer.decode of many tokens", "use `await asyncio.to_thread(...)`")
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i in self.special_ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        self.rendered_on_loop += on_loop()
        self._note(True, "apply_chat_template", RENDER)
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant:" if add_generation_prompt else "")

    def _note(self, long: bool, what: str, instead: str) -> None:
        if long and on_loop():
            self.blocking.append(f"{what} at {caller()}: {instead}")


class FakeEngineClient(EngineClient):
    """Answers every request with the pieces of `script`, one chunk each, the last with `finish_reason`
    and `extra`.

    With `uneven`, some requests are slower than others, as by chance. `refuse` is raised by `submit`. Before the
    piece of number `fail_at` the engine fails; before the one of number `stall_at` it falls silent until `release`
    is set. Without `accepting` being set, `submit` waits. Everything that was asked is kept: `requests`, `aborted`
    (ids of streams closed before their end), `abort_calls`, `flushes`, `controls`. A control action answers what
    `control_answers` holds for it.

    With `media`, a processor such as `fake_processor()`, the model takes media: those of `data:` addresses, and of the
    addresses of `web`. `laid_out` has what became of prompts with media.
    """

    _media: FakeMedia | None = None

    def __init__(
        self,
        script: Script = SCRIPT,
        *,
        refuse: InvalidRequest | None = None,
        fail_at: int | None = None,
        stall_at: int | None = None,
        tokenizer: FakeTokenizer | None = None,
        finish_reason: dict[str, Any] | None = None,
        failure: str = FAILURE,
        uneven: bool = False,
        features: Sequence[str] = (),
        media: MediaProcessor | None = None,
        web: Mapping[str, bytes] | None = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        self.script: Script = script if callable(script) else tuple(script)
        self.failure, self.refuse = failure, refuse
        self.fail_at, self.stall_at, self.uneven = fail_at, stall_at, uneven
        self.finish_reason, self.extra = finish_reason or {"type": "stop", "matched": 3}, extra
        self.busy, self.is_ready = False, True
        self.requests: list[GenerateRequest] = []
        self.laid_out: list[LaidOut] = []
        self.embedded: list[EmbedRequest] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.abort_calls: list[tuple[str, bool]] = []
        self.flushes = 0
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.control_answers: dict[str, dict[str, Any]] = {}
        self.submitted = asyncio.Event()
        self.accepting = asyncio.Event()
        self.accepting.set()
        self.release = asyncio.Event()
        self._tokenizer = tokenizer or FakeTokenizer()
        self._info = _model_info(self._tokenizer.vocab_size, features)
        if media is not None:
            self.take_media(media, web)

    def take_media(self, processor: MediaProcessor, web: Mapping[str, bytes] | None = None) -> None:
        """From now on be the engine of a model that takes media."""
        self._media = FakeMedia(processor, web or {})
        kinds = [f"media.{kind}" for kind in sorted(processor.kinds)]
        self._info = replace(self._info, features=(*self._info.features, *kinds))

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self._tokenizer

    @property
    def services(self) -> Mapping[str, object]:
        return {} if self._media is None else {"media": MediaService(self._media.processor, self.media_figures)}

    def media_figures(self) -> Mapping[str, object]:
        """Figures of preparing media."""
        return {}

    def max_body_bytes(self, most: int) -> int:
        return most if self._media is None else max(most, MEDIA_BODY)

    @property
    def ready(self) -> bool:
        return self.is_ready

    async def submit(self, request: GenerateRequest) -> OutputStream:
        if not self.is_ready:
            raise InvalidRequest("the engine is starting", code="not_ready", status=503)
        number = len(self.requests)
        asked = request
        if isinstance(request.prompt, MediaPrompt):
            # The caller lets go of its media.
            asked = msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt))
        self.requests.append(asked)
        self.submitted.set()
        laid_out = self._laid_out(asked.prompt)
        await self.accepting.wait()
        for _ in range(self.turns(number)):
            await asyncio.sleep(0)
        if self.refuse is not None:
            raise self.refuse
        return FakeStream(self, request, number, laid_out)

    def _laid_out(self, prompt: str | list[int] | AnnotatedPrompt) -> LaidOut | None:
        if not isinstance(prompt, AnnotatedPrompt):
            return None
        if self._media is None or not isinstance(prompt, MediaPrompt):
            raise InvalidRequest("this model takes no media", param="prompt", code="unsupported")
        self.laid_out.append(self._media.lay_out(prompt))
        return self.laid_out[-1]

    async def token_ids(
        self, prompt: str | list[int] | AnnotatedPrompt, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        laid_out = self._laid_out(prompt)
        if laid_out is None:
            return await super().token_ids(prompt, add_special_tokens=add_special_tokens)
        ids: list[int] = laid_out.layout.ids.tolist()
        return ids

    def turns(self, number: int) -> int:
        """Return how many turns of the event loop a request waits before each step."""
        return (number * 5 + 3) % 8 if self.uneven else 0

    def pieces(self, request: GenerateRequest, number: int) -> Sequence[str]:
        """Return the pieces of the answer to the request of this number."""
        return self.script(request, number) if callable(self.script) else self.script

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            check_length(text, self._info.max_context_len)
        return await asyncio.to_thread(
            lambda: [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        )

    async def embed(self, requests: Sequence[EmbedRequest]) -> list[Embedding]:
        """Deterministic vectors of four numbers, equal for equal prompts."""
        if not self.is_ready:
            raise InvalidRequest("the engine is starting", code="not_ready", status=503)
        if self.refuse is not None:
            raise self.refuse
        self.embedded += requests
        found = []
        for request in requests:
            tokens = _ids(request.prompt)
            vector = [1.0, len(tokens) / 64, sum(tokens) % 97 / 97, tokens[0] % 89 / 89][: request.dimensions]
            length = math.hypot(*vector) if request.normalize else 1.0
            found.append(Embedding([value / length for value in vector], len(tokens)))
        return found

    async def abort(self, rid: str = "", *, all_requests: bool = False) -> None:
        self.abort_calls.append((rid, all_requests))

    async def flush_cache(self) -> bool:
        if not self.busy:
            self.flushes += 1
        return not self.busy

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        self.controls.append((action, args or {}))
        if action not in self.control_answers:
            raise InvalidRequest(f"unknown control action {action!r}", code="unknown_action", status=404)
        return self.control_answers[action]

    async def server_info(self) -> dict[str, Any]:
        return {"config": {}, "scheduler": {"waiting_requests": 1, "running_requests": 2}, "ready": self.is_ready}


def _model_info(vocab_size: int, features: Sequence[str]) -> ModelInfo:
    """Describe the fake model. `features` come on top of those that need no grammar."""
    return ModelInfo(
        served_name="fake-model",
        path="/models/fake",
        architecture="FakeForCausalLM",
        architectures=("FakeForCausalLM", "FakeModel"),
        model_type="fake",
        max_context_len=4096,
        vocab_size=vocab_size,
        max_total_tokens=65536,
        dtype="float32",
        version="0",
        features=("input_logprobs", "hidden_states", "embeddings", *features),
    )


class FakeStream(OutputStream):
    """The scripted answer to one request."""

    def __init__(
        self, client: FakeEngineClient, request: GenerateRequest, number: int = 0, laid_out: LaidOut | None = None
    ) -> None:
        self.rid = request.rid or uuid.uuid4().hex
        self._client = client
        self._request = request
        self._number = number
        self._ended = False
        self._stall_at = client.stall_at
        self._prompt = _ids(request.prompt) if laid_out is None else laid_out.layout.ids.tolist()
        if laid_out is not None:
            self.item_tokens = laid_out.tokens

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[OutputChunk]:
        client = self._client
        script = client.pieces(self._request, self._number)
        sent = 0
        for number in itertools.count():
            for _ in range(1 + client.turns(self._number)):
                await asyncio.sleep(0)
            if number == self._stall_at:
                await client.release.wait()
            if number == client.fail_at:
                self._ended = True
                raise InvalidRequest(client.failure, code="engine_failed", status=503)
            if self._ended:
                return
            piece = script[number]
            ids = _ids(piece)
            sent += len(ids)
            last = number == len(script) - 1
            if last:
                self._ended = True
                client.finished.append(self.rid)
            yield OutputChunk(
                rid=self.rid,
                text=piece,
                token_ids=ids,
                finish_reason=client.finish_reason if last else None,
                prompt_tokens=len(self._prompt),
                completion_tokens=sent,
                cached_tokens=2,
                logprobs=self._logprobs(ids),
                input_logprobs=self._input_logprobs() if number == 0 else None,
                hidden_states=[[0.25, -0.5]] * len(ids) if self._request.return_hidden_states else None,
                extra=client.extra if last else None,
            )

    def _input_logprobs(self) -> list[Logprob] | None:
        request = self._request
        start, ids = request.logprob_start, self._prompt
        if start is None:
            return None
        first: list[Logprob] = [(None, ids[0], [])] if start == 0 else []
        return [*first, *(self._logprobs(ids[max(start, 1) :]) or [])]

    def _logprobs(self, ids: list[int]) -> list[tuple[float, int, list[tuple[float, int]]]] | None:
        top = self._request.logprobs
        if top is None:
            return None
        chosen = self._request.token_ids_logprob
        others = [(-0.5 - rank, 65 + rank) for rank in range(top)] + [(-9.0, token) for token in chosen]
        return [(-0.5, token, others) for token in ids]

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._client.aborted.append(self.rid)


def _ids(prompt: str | list[int] | AnnotatedPrompt) -> list[int]:
    found = prompt.base if isinstance(prompt, AnnotatedPrompt) else prompt
    return [ord(char) for char in found] if isinstance(found, str) else found


def prompt_text(prompt: str | list[int] | AnnotatedPrompt) -> str:
    """Return a prompt as text."""
    return "".join(map(chr, _ids(prompt)))
