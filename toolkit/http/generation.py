"""For API plugins: sampling fields that bodies share, and the answers of several requests of one HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pegboard.core.interfaces.client import EngineClient, GenerateRequest, Logprob, ModelInfo, OutputChunk, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SAMPLING_DEFAULTS, SamplingParams
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.processors import processors_of
from pegboard.toolkit.http.weight_version import DEFAULT, VERSION, told_versions
from pegboard.toolkit.media.inputs import MediaPrompt

Submit = Callable[[Sequence[GenerateRequest]], Awaitable[list[OutputStream]]]
"""What submits requests in place of `EngineClient.submit_all`."""

_LARGEST_SEED = 2**63 - 1

MAX_REQUESTS = 1024
"""Most engine requests that one HTTP request may stand for."""


class SamplingFields(RequestModel):
    """What APIs spell alike about sampling. A body adds how it calls the rest, and makes SamplingParams of it.

    A field that has its name and its type from SamplingParams needs this one line more.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: str | list[str] = []
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    custom_logit_processor: str | dict[str, Any] | list[str | dict[str, Any]] = ""
    """Logits processors of the config that this request wants, by name or as ``{"name": ..., "params": {...}}``."""
    custom_params: dict[str, Any] = {}
    """Parameters of the one processor that `custom_logit_processor` names; otherwise of several, by their names."""

    def sampling_params(
        self,
        *,
        max_new_tokens: int | None,
        min_new_tokens: int,
        prefix: str = "",
        processor: Any = "",
        **more: Any,
    ) -> SamplingParams:
        """Return the engine's parameters; `for_answer` makes those of several answers of them. `more` are further
        fields (a grammar), which take precedence; `prefix` goes before a field's name in errors. `processor` stands in
        for `custom_logit_processor` where a body has it elsewhere. Where the client has left a field out, the model's
        default counts, not the body's own.
        """
        fields = {
            **{name: getattr(self, name) for name in _SHARED},
            # OpenAI's range includes 0, which leaves the likeliest token.
            "top_p": self.top_p or 1e-9,
            "stop": tuple(filter(None, _texts(self.stop))),
            "stop_regex": _texts(self.stop_regex),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": _bias(self.logit_bias, prefix),
            "extra": processors_of(processor or self.custom_logit_processor, self.custom_params, prefix),
            "unset": self._unset(max_new_tokens, more),
            **more,
        }
        return SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, **fields)

    def in_force(self, name: str, defaults: Mapping[str, float]) -> object:
        """Return what counts for a parameter: what the client says, else the model's default, else this field's own."""
        return defaults[name] if name in defaults and name not in self.model_fields_set else getattr(self, name)

    def _unset(self, max_new_tokens: int | None, more: Mapping[str, object]) -> tuple[str, ...]:
        """Return the sampling parameters that the client has not set, and `more` neither."""
        known, given = type(self).model_fields, self.model_fields_set
        limits = _LIMITS & known.keys()
        left = known.keys() - given - limits - more.keys()
        unset = [name for name in SAMPLING_DEFAULTS if name in left]
        # What is said may mean no limit, as Ollama's -1 does; null says nothing.
        said = any(getattr(self, name) is not None for name in limits & given)
        left_open = not said if limits else max_new_tokens is None
        return (*unset, "max_new_tokens") if left_open else tuple(unset)


_LIMITS = frozenset({"max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"})
"""What bodies call the most tokens of an answer."""

_SHARED = tuple(name for name in SamplingFields.model_fields if name in SamplingParams.__struct_fields__)
"""What body and engine call alike, and what needs no translation if nothing above gives one."""


def for_answer(params: SamplingParams, answer: int) -> SamplingParams:
    """Parameters for the answer of this number: with a seed, each has one of its own. All else is shared."""
    seed = params.seed
    if not answer or seed is None or not -_LARGEST_SEED - 1 <= seed <= _LARGEST_SEED:
        return params
    # After the largest seed comes the smallest one.
    own = (seed + answer + _LARGEST_SEED + 1) % (2 * _LARGEST_SEED + 2) - _LARGEST_SEED - 1
    return msgspec.structs.replace(params, seed=own)


def _texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def check_model(info: ModelInfo, name: str) -> None:
    """Raise InvalidRequest (404) unless `name` means one of the served names (see `ModelInfo.named`), or one of the
    further names, written behind the first and a colon.
    """
    further = name.removeprefix(f"{info.served_name}:")
    if info.named(name) not in info.names and (further == name or further not in info.other_names):
        raise InvalidRequest(
            f"the model {name[:256]!r} does not exist; this server has {', '.join(map(repr, info.names))}",
            param="model",
            code="model_not_found",
            status=404,
        )


def salt_of(cache_salt: str, extra_key: str) -> str:
    """Return one salt of the two names that the field knows for it."""
    return f"{cache_salt}\0{extra_key}" if extra_key else cache_salt


def _bias(bias: dict[str, float], prefix: str) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequest("logit_bias maps token ids to numbers", param=f"{prefix}logit_bias") from None


@dataclass(slots=True)
class Answer:
    """One request's output so far."""

    rid: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, list[tuple[float, int]]]] = field(default_factory=list)
    input_logprobs: list[Logprob] = field(default_factory=list)
    hidden_states: list[list[float]] = field(default_factory=list)
    extra: dict[str, object] = field(default_factory=dict)
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_from: Mapping[str, int] = field(default_factory=dict)
    weights: dict[str, object] = field(default_factory=lambda: {VERSION: DEFAULT})
    """Which weights it came from, by the names of `told_versions`."""
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the prompt's tokens those of media, by kind."""

    def add(self, chunk: OutputChunk, *, whole: bool = True) -> None:
        """Take a chunk in; without `whole` only its text, tokens and counters, which stay small."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if whole:
            self.logprobs += chunk.logprobs or ()
            self.input_logprobs += chunk.input_logprobs or ()
            self.hidden_states += chunk.hidden_states or ()
            self.extra.update(chunk.extra or {})
        if chunk.extra:
            self.weights.update(told_versions(chunk.extra))
        self.finish_reason = chunk.finish_reason
        self.prompt_tokens, self.completion_tokens = chunk.prompt_tokens, chunk.completion_tokens
        self.cached_tokens, self.num_retractions = chunk.cached_tokens, chunk.num_retractions
        if chunk.drafted_tokens:  # a step without drafts may say nothing of the total
            self.drafted_tokens, self.accepted_tokens = chunk.drafted_tokens, chunk.accepted_tokens
        self.cached_from = chunk.cached_from


LARGE_ANSWERS = 4096
"""Log-probabilities and numbers of hidden states from which on answers are written in a thread."""


def are_large(answers: Iterable[Answer]) -> bool:
    """Return whether writing these answers takes so long that the event loop should not do it."""
    entries = 0
    for one in answers:
        for found in (one.logprobs, one.input_logprobs):
            entries += len(found) * (1 + len(found[-1][2])) if found else 0
        entries += len(one.hidden_states) * len(one.hidden_states[0]) if one.hidden_states else 0
    return entries > LARGE_ANSWERS


class Answers:
    """Accepted requests, read together. `aclose` aborts those that have not finished.

    Without `whole`, the answers do not collect logprobs and hidden states: a stream sends them as they come.
    """

    def __init__(self, streams: Sequence[OutputStream], *, whole: bool = True) -> None:
        self._streams = list(streams)
        self._whole = whole
        self.answers = [Answer(stream.rid, media_tokens=stream.item_tokens) for stream in self._streams]
        """What has been read so far, in the order of the requests."""
        self._pumps: list[asyncio.Future[None]] = []
        self._source = self._read()
        self._begun: tuple[int, OutputChunk] | None = None
        self._waking: asyncio.Handle | None = None

    @classmethod
    async def submit(
        cls,
        client: EngineClient,
        requests: Sequence[GenerateRequest],
        submit: Submit | None = None,
    ) -> Answers:
        """Submit all at once, with `submit` where it is given, and else with the client's `submit_all`. Where one is
        refused the others are aborted and its InvalidRequest is raised. Once they are accepted, their prompts let go of
        the media: those may take many megabytes, and an answer takes long.

        Whether a grammar is any good turns out after its request has been accepted. So that a stream can be refused
        before it has begun, one with a grammar is waited for until its first output.
        """
        streams = await (submit or client.submit_all)(requests)
        answers = cls(streams, whole=not any(one.stream for one in requests))
        for one in requests:
            if isinstance(one.prompt, MediaPrompt):
                one.prompt.media = ()
        if any(one.stream and one.sampling.grammar is not None for one in requests):
            await answers.begin()
        return answers

    async def begin(self) -> None:
        """Wait for the first output. On any error, cancellation included, all is aborted."""
        try:
            self._begun = await anext(self._source, None)
        except BaseException:
            await self.aclose()
            raise

    async def chunks(self) -> AsyncIterator[tuple[int, OutputChunk]]:
        """(index of the request, what is new of it), as it comes; the matching `Answer` is up to date."""
        async with contextlib.aclosing(self._source) as source:
            if self._begun is not None:
                yield self._begun
            async for one in source:
                yield one

    @property
    def live(self) -> bool:
        """Whether `watch` and `take` may be used in place of `chunks`, which is lighter (see OutputStream)."""
        return not self._pumps and all(stream.live for stream in self._streams)

    def watch(self, wake: Callable[[], None]) -> None:
        """From now on, call `wake` in the event loop whenever there may be something to take: for what comes of several
        requests at one time, once. It must not raise.
        """
        if len(self._streams) == 1:
            self._streams[0].watch(wake)
            return
        loop = asyncio.get_running_loop()

        def run() -> None:
            self._waking = None
            wake()

        def soon() -> None:
            if self._waking is None:
                self._waking = loop.call_soon(run)

        for stream in self._streams:
            stream.watch(soon)

    def take(self) -> Iterable[tuple[int, OutputChunk]]:
        """As `chunks`, of what is there now."""
        if len(self._streams) > 1 or self._begun is not None:
            return self._take_all()
        chunk = self._streams[0].take()
        if chunk is None:
            return ()
        self.answers[0].add(chunk, whole=self._whole)
        return ((0, chunk),)

    def _take_all(self) -> Iterator[tuple[int, OutputChunk]]:
        if self._begun is not None:
            begun, self._begun = self._begun, None
            yield begun
        for index, stream in enumerate(self._streams):
            chunk = stream.take()
            if chunk is not None:
                self.answers[index].add(chunk, whole=self._whole)
                yield index, chunk

    @property
    def over(self) -> bool:
        """Whether all answers have ended well, and have been read to their ends."""
        if len(self.answers) == 1:
            return self._begun is None and self.answers[0].finish_reason is not None
        return self._begun is None and all(one.finish_reason is not None for one in self.answers)

    async def _read(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        if len(self._streams) == 1:
            async for chunk in self._streams[0]:
                self.answers[0].add(chunk, whole=self._whole)
                yield 0, chunk
            return
        # One place per stream: a slow reader makes chunks larger, not more.
        queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]] = asyncio.Queue(len(self._streams))
        self._pumps = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        unfinished = len(self._pumps)
        try:
            while unfinished:
                index, item = await queue.get()
                if item is None:
                    unfinished -= 1
                    continue
                if isinstance(item, Exception):
                    raise item
                self.answers[index].add(item, whole=self._whole)
                yield index, item
        finally:
            await self._stop_pumps()

    async def collect(self) -> list[Answer]:
        """Return all answers, when all have finished. On any error, cancellation included, the rest is aborted."""
        try:
            async for _ in self.chunks():
                pass
        finally:
            await self.aclose()
        return self.answers

    async def aclose(self) -> None:
        for stream in self._streams:
            await stream.aclose()
        if self._waking is not None:
            self._waking.cancel()
        with contextlib.suppress(RuntimeError):
            # That it is being read just now.
            await self._source.aclose()
        await self._stop_pumps()

    async def _stop_pumps(self) -> None:
        pumps, self._pumps = self._pumps, []
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: OutputStream, queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]]
) -> None:
    try:
        async for chunk in stream:
            await queue.put((index, chunk))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
