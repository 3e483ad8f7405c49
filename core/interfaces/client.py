"""What an API plugin sees of the engine: requests in, a stream of outputs back. No torch anywhere near."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pegboard.core.interfaces.conversion import Converting
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import BY_STAGES, SamplingParams, stage_fields

if TYPE_CHECKING:
    from pegboard.core.interfaces.tokenizer import Tokenizer


class AnnotatedPrompt(msgspec.Struct, kw_only=True):
    """A prompt of which more is known than its text or tokens, `base`. `literals` are [start, stop) of a text's
    characters that spell a token of the model and mean that text.

    A subclass has `items` that stand in the place of tokens, and that a FrontendStage puts there (`PromptExpander`).
    """

    base: str | list[int]
    literals: tuple[tuple[int, int], ...] = ()

    @property
    def items(self) -> Sequence[object]:
        """What stands beside the text."""
        return ()

    def refusal(self, *, embedding: bool = False) -> InvalidRequest:
        """Return the answer to a prompt whose items no stage can place, or none for an `embedding`."""
        return InvalidRequest("this engine takes no such prompt", param="prompt", code="unsupported")


class GenerateRequest(msgspec.Struct, metaclass=Converting, kw_only=True):
    """One request as an API plugin states it. `prompt` is text, token ids, or either with items in it;
    `rid` "" lets the engine name it.

    `cache_salt` separates cached prefixes: requests share KV only with equal salts. `logprobs` None means none; 0 the
    sampled token's; k the k largest too, and with `logprob_start` the same of the prompt's tokens from there on.
    `return_hidden_states` asks for the last hidden state after each output token. `add_special_tokens` False for text
    that a chat template already completed.
    `params` are plain values for plugins that act on requests (admission gates, schedule policies), by the name of the
    provider meant. `model` is the name that the request calls the model by, see `ModelInfo.named`.
    """

    prompt: str | list[int] | AnnotatedPrompt
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams.of)
    rid: str = ""
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""
    logprobs: int | None = None
    logprob_start: Annotated[int | None, BY_STAGES] = None
    token_ids_logprob: tuple[int, ...] = ()
    return_hidden_states: Annotated[bool, BY_STAGES] = False
    add_special_tokens: bool = True
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    model: str = ""


class EmbedRequest(msgspec.Struct, metaclass=Converting, kw_only=True):
    """A prompt whose embedding is wanted: as of GenerateRequest, without anything that is about generation.

    The vector has length 1 with `normalize`; `dimensions` keeps its first numbers only (then normalised again).
    """

    prompt: str | list[int]
    rid: str = ""
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = True
    normalize: bool = True
    dimensions: int | None = None
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    model: str = ""


STAGE_FIELDS, SAMPLING_FIELDS = stage_fields(GenerateRequest), stage_fields(SamplingParams)
"""Fields of requests and of their sampling parameters that stages serve, with the values that ask for nothing."""


@dataclass(slots=True)
class Embedding:
    """One prompt's vector, and what it took."""

    vector: list[float]
    prompt_tokens: int
    cached_tokens: int = 0


Logprob = tuple[float | None, int, list[tuple[float, int]]]
"""(logprob, token id, top list of (logprob, id)); no logprob for a prompt's first token, which nothing precedes."""


@dataclass(slots=True)
class OutputChunk:
    """What is new since the last chunk: `text` and `token_ids`; the last chunk has a `finish_reason` (see
    FinishReason.to_dict).

    Text lags behind tokens where characters or stop strings are incomplete. `logprobs` has, per token of `token_ids`,
    (logprob, token id, top list of (logprob, id)). `input_logprobs`, of the prompt from `logprob_start` on, come with
    the first chunk. `hidden_states` has one list of numbers per token of `token_ids`; `vector` is the prompt's;
    `extra` is what other stages say, by their names. Counters are totals so far; of `drafted_tokens` that were proposed
    and verified, `accepted_tokens` are part of the output: both are 0 in a chunk of a step without any, unless it is
    the last one. `cached_from` says how many of the `cached_tokens` were loaded, by where they came from.
    """

    rid: str
    text: str
    token_ids: list[int]
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    logprobs: list[tuple[float, int, list[tuple[float, int]]]] | None = None
    input_logprobs: list[Logprob] | None = None
    hidden_states: list[list[float]] | None = None
    vector: list[float] | None = None
    extra: dict[str, object] | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_from: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What API plugins may tell of the served model. `vocab_size` bounds token ids. `features` says what requests may
    ask of this engine: `grammar.<kind>`, `logits_processor.<name>` for those that take parameters, and
    what stages offer (`Stage.offers`).
    """

    served_name: str
    path: str
    architecture: str
    max_context_len: int
    vocab_size: int
    max_total_tokens: int
    dtype: str
    version: str
    created: int = 0
    providers: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    hidden_size: int = 0
    """Numbers of a hidden state; 0 where it is not known."""
    most_requests: int | None = None
    """Requests that the engine holds at once, of all clients, those that wait included; None: any number."""
    most_tokens: int | None = None
    """The same of the tokens of their prompts."""
    other_names: Sequence[str] = ()
    """Further names by which requests may call the model; answers have `served_name`."""
    model_type: str = ""
    """`model_type` of the model's own config; "" where that has none."""
    architectures: Sequence[str] = ()
    """`architectures` of the model's own config, of which `architecture` is the one that runs."""
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What stages tell of themselves, by their names (`Stage.info`)."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of requests that do not say otherwise: the model's own, or those of the config."""
    kv_bytes_per_token: int = 0
    """Bytes of the KV pool that a token takes in all layers; 0 where it is not known."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the model, the one that answers have first."""
        return (self.served_name, *self.other_names)

    def named(self, model: str) -> str:
        """Return the served name that a request means by `model`: `served_name` where it says nothing, or the path."""
        return self.served_name if model in UNNAMED or model == self.path else model


UNNAMED = ("", "unknown")
"""Values of `model` that name none. SGLang's router sends the second where its own client gave no model."""

ABORTED_BY_CLIENT = 499


def failure(reason: Mapping[str, Any] | None) -> InvalidRequest | None:
    """Return the error of an output that failed. None where it ended well, or its client aborted it: what it has is the
    answer.
    """
    if reason is None or reason.get("type") != "abort":
        return None
    status = int(reason.get("status", 0))
    if status < 400 or status == ABORTED_BY_CLIENT:
        return None
    message = str(reason.get("message") or "the engine failed this request")
    return InvalidRequest(
        message, param=reason.get("param"), code=str(reason.get("code") or "engine_failed"), status=status
    )


class OutputStream(abc.ABC):
    """The outputs of one accepted request. Closing it before the end aborts the request.

    Iterating raises InvalidRequest with a status of 500 or above where the engine failed the request on the way. A
    reader that falls behind gets fewer, larger chunks. Iterate it once.

    A stream that is `live` may be read without a task that waits for it: `watch` it and `take` what is there, instead
    of iterating. That is lighter, where there are many streams and each step of the engine brings one token of each.
    """

    rid: str
    live: bool = False
    """Whether `watch` and `take` are offered."""
    item_tokens: Mapping[str, int] = MappingProxyType({})
    """Prompt tokens that items of the prompt take, by kind."""

    def watch(self, wake: Callable[[], None]) -> None:
        """From now on, call `wake` in the event loop whenever there may be something to take. It must not raise."""
        raise NotImplementedError

    def take(self) -> OutputChunk | None:
        """Return what is new; None where nothing is, and after the end. Raises as iterating does."""
        raise NotImplementedError

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Abort the request unless it has finished. May be called twice."""


class EngineClient(abc.ABC):
    """The engine as an API plugin sees it."""

    @property
    @abc.abstractmethod
    def info(self) -> ModelInfo: ...

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    def asker(self) -> str:
        """The name of the key whose request is being served, for turns among several; "" without one."""
        return ""

    @property
    def services(self) -> Mapping[str, object]:
        """What stages offer APIs for the model that is served, by the stages' names (`FrontendStage.service`)."""
        return {}

    def max_body_bytes(self, most: int) -> int:
        """Return the largest body of a request in bytes, where requests without items may have `most`."""
        return most

    @property
    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether requests are accepted: False while starting, draining, or without a scheduler."""

    @abc.abstractmethod
    async def submit(self, request: GenerateRequest) -> OutputStream:
        """Validate, tokenise and send; return once the scheduler accepted.

        Raises InvalidRequest with an HTTP status and the field's name where anything on the way refused.
        """

    async def submit_all(self, requests: Sequence[GenerateRequest]) -> list[OutputStream]:
        """Submit requests that belong together (a batch, several answers to one prompt); their streams, in order.

        All are accepted, or none: where one is refused the others are aborted, and its InvalidRequest is raised.
        """
        tasks = [asyncio.ensure_future(self.submit(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for done in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(done, OutputStream):
                    await done.aclose()
            raise

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return token ids of texts, computed beside the event loop. Raises InvalidRequest for a text longer than the
        context.
        """
        return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    async def token_ids(
        self, prompt: str | list[int] | AnnotatedPrompt, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """Return the tokens of a prompt, its items' included, even if they exceed the context. Raises InvalidRequest as
        `submit`.
        """
        if isinstance(prompt, AnnotatedPrompt):
            raise prompt.refusal()
        if isinstance(prompt, list):
            return prompt
        return (await self.tokenize([prompt], add_special_tokens=add_special_tokens))[0]

    async def count_tokens(self, prompt: str | list[int] | AnnotatedPrompt, *, add_special_tokens: bool = True) -> int:
        """Return how many tokens a prompt has, items included. Raises InvalidRequest as `token_ids` does."""
        return len(await self.token_ids(prompt, add_special_tokens=add_special_tokens))

    def charge(self, size: int) -> None:  # noqa: B027 - an engine may keep no accounts
        """Charge the request that is being served for an answer of `size` bytes, until that is sent. Call it before an
        answer is made that no other method here makes. Raises InvalidRequest: 400 where it exceeds a request's budget,
        503 where other requests have used up the common one.
        """

    async def embed(self, requests: Sequence[EmbedRequest]) -> list[Embedding]:
        """Embeddings of prompts, in order; all of them, or InvalidRequest. Being cancelled aborts them."""
        raise InvalidRequest("this engine makes no embeddings", code="no_embeddings")

    @abc.abstractmethod
    async def abort(self, rid: str = "", *, all_requests: bool = False) -> None:
        """Abort one request by id, or all. Unknown ids are ignored."""

    @abc.abstractmethod
    async def flush_cache(self) -> bool:
        """Drop every cached prefix; False, with nothing changed, while requests are waiting or running."""

    @abc.abstractmethod
    async def server_info(self) -> dict[str, Any]:
        """Return the configuration (redacted) and the scheduler's counters, as plain values."""

    @abc.abstractmethod
    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run a control action of the scheduler (see EngineView.add_control) between two steps; its answer.

        Raises InvalidRequest for an unknown action, for arguments that the action refuses, and where no scheduler is
        there.
        """
