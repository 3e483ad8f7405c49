"""Engine: the whole pipeline in one process, for offline use and tests. Imports neither FastAPI nor ZeroMQ."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.select import Selection
from pegboard.core.engine.asking import (
    OneSampling,
    Prompt,
    Sampling,
    one_prompt,
    params_of,
    plain_prompts,
    prompts_of,
    spread,
)
from pegboard.core.engine.source import PreparedModel
from pegboard.core.engine.stages import frontend_context, frontend_features
from pegboard.core.frontend.intake import Intake
from pegboard.core.frontend.outputs import OutputState, finish_embedding
from pegboard.core.frontend.prompts import Packed, Prompts
from pegboard.core.interfaces.client import (
    AnnotatedPrompt,
    Embedding,
    EmbedRequest,
    GenerateRequest,
    Logprob,
    ModelInfo,
    OutputChunk,
    failure,
)
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
)
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.scratch import new_directory
from pegboard.toolkit.system.threads import yield_when_waiting

if TYPE_CHECKING:
    from pegboard.core.engine.build import BuiltScheduler
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.pipeline.scheduler import Scheduler

RESTING_SECONDS = 0.002
"""How long a step waits while all requests are held back by gates."""


@dataclass(slots=True)
class GenerateOutput:
    """One finished answer. `logprobs` has (logprob, token id, top list) per token where it was asked for."""

    rid: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_host: int = 0
    cached_storage: int = 0
    logprobs: list[tuple[float, int, list[tuple[float, int]]]] | None = None
    input_logprobs: list[Logprob] | None = None
    hidden_states: list[list[float]] | None = None
    extra: dict[str, object] = field(default_factory=dict)

    def add(self, chunk: OutputChunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.prompt_tokens, self.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
        self.num_retractions = chunk.num_retractions
        if total := chunk.drafted_tokens:  # not every chunk says it
            self.drafted_tokens, self.accepted_tokens = total, chunk.accepted_tokens
        self.cached_host, self.cached_storage = (chunk.cached_from.get(name, 0) for name in ("host", "storage"))
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        if chunk.input_logprobs is not None:
            self.input_logprobs = chunk.input_logprobs
        self.extra.update(chunk.extra or {})
        if chunk.hidden_states is not None:
            self.hidden_states = (self.hidden_states or []) + chunk.hidden_states
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason


class Engine:
    """One model, served in this process.

    >>> with Engine.from_config({"model": {"path": "demo:smollm2-135m-instruct"}}) as engine:  # doctest: +SKIP
    ...     print(engine.generate("The capital of France is").text)

    Not thread-safe, but several streams may be read in turn. What fails on the way to the scheduler raises
    InvalidRequest before anything runs. A request that fails later is answered all the same: its output's
    `finish_reason` has the type ``abort``, with a `message`, an HTTP `status` and sometimes a `code`; others go on.
    Where the scheduler itself raises, such as for a prefix cache that loses pages, the engine has stopped: what would
    need it raises that error from then on.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        yield_when_waiting()
        # Only now: torch comes with it, and OpenMP settles how threads wait when it is loaded.
        from pegboard.core.engine.build import build_scheduler

        resolved.warn()
        # It offers no API, and plugins that act for one need not.
        self.resolved = replace(resolved, engine=resolved.engine.model_copy(update={"apis": ()}))
        scratch = new_directory()
        self._built: BuiltScheduler | None = build_scheduler(self.resolved, scratch)
        prepared = PreparedModel(self._built.directory, self._built.tokenizer)
        about = frontend_context(self.resolved, Selection(self.resolved), prepared, scratch)
        self._features = frontend_features(self._built.hooks, about)
        self._intake = Intake(self.info, self.tokenizer, self._features)
        self._prompts = Prompts(self._intake, self.tokenizer, self._features.expanders(self.info))
        self._held: dict[str, Packed] = {}
        """Prompts of requests under way, with what these need until they end."""
        self._mail: dict[str, list[TokenOutput]] = {}
        """Per request under way, what the scheduler said and its reader has not taken yet."""
        self._ended: set[str] = set()
        """Of these the last word has been said. What a gate still holds of them is not their reader's to give up."""
        self._stopped: Exception | None = None
        """What the scheduler raised: which memory belongs to which request is not known any more."""
        self._polled: dict[str, OutputState] = {}
        """Of these `poll` is the reader."""
        self._built.hooks.call.engine_started(info=self.info, engine=self._built.view)

    @classmethod
    def from_config(cls, data: Mapping[str, Any], *files: str, overrides: Sequence[str] = ()) -> Engine:
        """From a nested mapping, laid over config files if there are any. The environment counts as usual."""
        return cls(compose(files, data=data, overrides=overrides))

    @property
    def built(self) -> BuiltScheduler:
        """The parts, for tests and tools."""
        if self._built is None:
            raise PegboardError("this engine is closed")
        return self._built

    @property
    def _scheduler(self) -> Scheduler:
        """For what is to run. Raises anew what has stopped the engine."""
        if self._stopped is not None:
            raise _again(self._stopped) from self._stopped
        return self.built.scheduler

    @property
    def info(self) -> ModelInfo:
        return self.built.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self.built.tokenizer

    @property
    def services(self) -> Mapping[str, object]:
        """What stages offer, by their names; see `EngineClient.services`."""
        return self._features.services(self.info)

    @overload
    def generate(
        self, prompts: str | list[int] | AnnotatedPrompt, sampling: OneSampling = None, **options: Any
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling = None, **options: Any
    ) -> list[GenerateOutput]: ...

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None, **options: Any
    ) -> GenerateOutput | list[GenerateOutput]:
        """Return answers to all prompts (texts, lists of token ids, or either with items), batched together; one answer
        for a single prompt. Token ids may be rows of numpy or torch.

        `sampling` holds for all, or is a list with one entry per prompt: SamplingParams, exactly as they are, or
        mappings, whose gaps the model's sampling defaults fill; without any these hold. `options` are further fields of
        GenerateRequest, such as ``logprobs=5``. Raises InvalidRequest for the first prompt that cannot be served, and
        nothing runs.
        """
        asked, single = prompts_of(prompts)
        requests = [
            GenerateRequest(prompt=prompt, sampling=params, **options)
            for prompt, params in zip(asked, spread(sampling, len(asked)), strict=True)
        ]
        outputs = self.run(requests)
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, sampling: OneSampling = None, **options: Any) -> Iterator[OutputChunk]:
        """Yield one answer as it comes; arguments as of `generate`. Closing the iterator early aborts the request."""
        request = GenerateRequest(prompt=one_prompt(prompt), sampling=params_of(sampling), stream=True, **options)
        prepared = self._submit([request])[0]
        state = OutputState(prepared, self.tokenizer, self._features)
        try:
            while True:
                for output in self._take(prepared.rid):
                    yield state.push(output)
                    if output.finish_reason is not None:
                        return
        finally:
            self._forget([prepared.rid])

    def run(self, requests: Sequence[GenerateRequest]) -> list[GenerateOutput]:
        """Return answers in the order of the requests, which may differ in every field.

        One that fails on the way has what it said so far, and a `finish_reason` that says why:
        ``{"type": "abort", "message": ..., "status": 500}``. Raises InvalidRequest as `generate` does, and what the
        scheduler raises, if it does: the engine has stopped then.
        """
        prepared = self._submit(requests)
        outputs = [GenerateOutput(one.rid) for one in prepared]
        try:
            for one, output in zip(prepared, outputs, strict=True):
                state = OutputState(one, self.tokenizer, self._features)
                while not output.finish_reason:
                    for part in self._take(one.rid):
                        output.add(state.push(part))
        finally:
            self._forget([one.rid for one in prepared])
        return outputs

    def submit(self, request: GenerateRequest) -> str:
        """Queue a request, whose output `poll` brings; its rid. Raises InvalidRequest as `generate` does.

        For callers with many requests, some always under way, who want each answer as it is finished.
        """
        prepared = self._submit([request])[0]
        self._polled[prepared.rid] = OutputState(prepared, self.tokenizer, self._features)
        return prepared.rid

    def poll(self) -> list[OutputChunk]:
        """Return what is new of the submitted requests, after one step of the scheduler at most; nothing, perhaps.

        The chunk that has a `finish_reason` is a request's last one.
        """
        if (self._polled or self._stopped) and not any(self._mail[rid] for rid in self._polled):
            self._step()
        chunks: list[OutputChunk] = []
        for rid, state in self._polled.items():
            outputs, self._mail[rid] = self._mail[rid], []
            chunks += (state.push(output) for output in outputs)
        self.abort(*(chunk.rid for chunk in chunks if chunk.finish_reason is not None))
        return chunks

    def abort(self, *rids: str) -> None:
        """Forget submitted requests, whether they have ended or not; `poll` brings nothing more of them."""
        known = [rid for rid in rids if self._polled.pop(rid, None) is not None]
        if known:
            self._forget(known)

    def embed(self, prompts: Sequence[str | list[int]], **options: Any) -> list[Embedding]:
        """Embeddings of prompts (texts or lists of token ids), batched together. `options` are further fields of
        EmbedRequest, such as ``dimensions=256``. Raises InvalidRequest as `generate` does.
        """
        requests = [EmbedRequest(prompt=prompt, **options) for prompt in plain_prompts(prompts)]
        prepared = self._send([self._intake.prepare_embed(one) for one in requests])
        found = []
        try:
            for request, one in zip(requests, prepared, strict=True):
                last = self._take(one.rid)[-1]
                if (error := failure(last.finish_reason)) is not None:
                    raise error
                found.append(finish_embedding(request, last, self._features))
        finally:
            self._forget([one.rid for one in prepared])
        return found

    def control(self, action: str, **args: object) -> dict[str, object]:
        """Run a control action to its end, such as ``pause_generation``; its answer. Raises InvalidRequest."""
        with self._watched() as scheduler:
            replies = scheduler.receive([ControlRequest(call_id=0, action=action, args=args)])
        while not replies:
            self._step()
            with self._watched() as scheduler:
                replies = scheduler.receive([])
        assert isinstance(replies[0], ControlReply)
        replies[0].check(action)
        return replies[0].payload

    def flush_cache(self) -> None:
        """Forget every cached prefix."""
        self._scheduler.components.memory.cache.reset()

    def stats(self) -> dict[str, Any]:
        """Return the scheduler's counters, queues and memory."""
        return self.built.scheduler.info()

    def close(self) -> None:
        """Give back the model's memory. May be called twice."""
        if self._built is not None:
            self._features.close()
            self._built.hooks.call.shutdown()
            self._built.close()
            self._built = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, requests: Sequence[GenerateRequest]) -> list[TokenizedRequest]:
        with self._prompts.packed_now(requests) as packed:
            prepared = self._intake.prepare_all(requests, [one.ids for one in packed])
            prepared = [prompt.complete(one) for prompt, one in zip(packed, prepared, strict=True)]
            self._send(prepared)
            for one, prompt in zip(prepared, packed, strict=True):
                if prompt.held:
                    prompt.keep()
                    self._held[one.rid] = prompt
        return prepared

    def _send(self, prepared: list[TokenizedRequest]) -> list[TokenizedRequest]:
        for one in prepared:
            if one.rid in self._mail:
                raise InvalidRequest(f"the request {one.rid!r} is still running", param="rid", code="duplicate_rid")
        with self._watched() as scheduler:
            replies = scheduler.receive([TokenizedBatch(requests=prepared)])
        accepted = [reply.rid for reply in replies if isinstance(reply, Accepted)]
        self._mail.update((rid, []) for rid in accepted)
        for reply in replies:
            if isinstance(reply, Rejected):
                self._forget(accepted)
                raise InvalidRequest(reply.message, param=reply.param, code=reply.code, status=reply.status)
        return prepared

    def _take(self, rid: str) -> list[TokenOutput]:
        """Return what is new of a request; steps until there is something, and keeps what that says of others."""
        while not self._mail[rid]:
            self._step()
        new, self._mail[rid] = self._mail[rid], []
        return new

    def _step(self) -> None:
        with self._watched() as scheduler:
            if scheduler.resting:
                time.sleep(RESTING_SECONDS)
            outputs = scheduler.step()
        for output in outputs:
            if output.rid in self._mail:
                self._mail[output.rid].append(output)
                if output.finish_reason is not None:
                    self._ended.add(output.rid)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Scheduler]:
        """Lend the scheduler, and stop it for good at its first exception: that is not a request's failure."""
        scheduler = self._scheduler
        try:
            yield scheduler
        except Exception as error:
            self._stopped = error
            raise

    def _forget(self, rids: Sequence[str]) -> None:
        """Their reader has gone: abort those that have not ended."""
        for rid in rids:
            self._mail.pop(rid, None)
        running = [rid for rid in rids if rid not in self._ended]
        self._ended.difference_update(rids)
        if self._stopped is not None:
            self._drop_held(rids)
        if self._built is None or self._stopped is not None:
            return
        with self._watched() as scheduler:
            scheduler.receive([AbortRequest(rid=rid) for rid in running])
        self._drop_held(rids)
        if not self._mail:
            # Nothing is left to run; the scheduler only says its last words.
            self._step()

    def _drop_held(self, rids: Sequence[str]) -> None:
        """Let go of what requests needed that the scheduler does not run any more."""
        for rid in rids:
            if (prompt := self._held.pop(rid, None)) is not None:
                prompt.drop()


def _again(error: Exception) -> Exception:
    """Return an error of the same type, as far as its type can be built from a text: for later calls."""
    text = f"the engine has stopped, and a new one is needed: {in_words(error)}"
    try:
        again = type(error)(text)
    except Exception:
        return PegboardError(text)
    return again if text in str(again) else PegboardError(text)
