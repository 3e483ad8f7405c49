"""The API process's half of a feature: what it does with requests, prompts and answers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import msgspec
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.choosing import Blueprint
    from pegboard.core.interfaces.client import AnnotatedPrompt, EmbedRequest, GenerateRequest, ModelInfo, OutputChunk
    from pegboard.core.interfaces.contract import Contract, Ctx, T
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.core.interfaces.stops import CompiledStops
    from pegboard.core.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FrontendContext:
    """What the hook `frontend_stages` gets. `config` is the EngineConfig, `directory` the prepared model's. `find`
    builds what is chosen for a contract of the API's side; None where the config names no provider and none supports
    the context. `blueprint` says of what it has built how another process can do so. `scratch` is a directory that this
    process shares with the scheduler's, and that a stage may make.
    """

    config: Any
    directory: Path
    tokenizer: Tokenizer
    find: Callable[[Contract[T, Ctx], Ctx], T | None]
    blueprint: Callable[[Contract[T, Ctx]], Blueprint]
    scratch: Path


class Held(Protocol):
    """What requests need until they have ended, such as a file."""

    def keep(self) -> None:
        """Note one more request that needs it, and drops it in its turn."""

    def drop(self) -> None:
        """Note that a request does not need it any more; the last one lets it go."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt with its items in place: `ids` int64 [length], and the `feature` that the Stage gets with each request
    that has it, anything that msgspec encodes. `tokens` of the prompt are those of items, by kind. `note` says so where
    the prompt is too long. Requests hold `held` until they end.
    """

    ids: NDArray[np.int64]
    feature: object
    tokens: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    held: Sequence[Held] = ()


TokenIds: TypeAlias = "NDArray[np.integer[Any]]"
"""Tokens of a prompt, [length]."""

Expand = Callable[[TokenIds], "Expanded | None"]
"""Puts the items of one prompt among its tokens; None where there is nothing to put. Called in a thread."""


class PromptExpander(abc.ABC):
    """Puts items that prompts bring in the place of tokens. Thread-safe."""

    @abc.abstractmethod
    def check(self, prompt: AnnotatedPrompt) -> None:
        """First of all, for a prompt with items: raise InvalidRequest for what is refused without reading it."""

    @abc.abstractmethod
    def takes(self, prompt: object, ids: TokenIds) -> bool:
        """Once a prompt's tokens are known, [length]: return whether it is to be expanded. Cheap where it is not.
        Raises InvalidRequest where items and placeholders do not match.
        """

    @abc.abstractmethod
    def prepared(self, prompts: Sequence[object], asker: str) -> AbstractAsyncContextManager[Sequence[Expand]]:
        """Prepare the items of prompts that belong together, beside the event loop, in the turns of who asks; they are
        there while the context lasts, and longer for requests that hold them. Raises InvalidRequest.
        """

    @abc.abstractmethod
    def prepared_now(self, prompts: Sequence[object]) -> AbstractContextManager[Sequence[Expand]]:
        """As `prepared`, in this thread."""


@dataclass(frozen=True, slots=True)
class Price:
    """What answering costs the API process, in numbers of things (see `server.budget`): log-probabilities, numbers of
    vectors, such numbers for each output token, what ends it by its text, and characters that the request has brought.
    """

    entries: int = 0
    numbers: int = 0
    numbers_per_token: int = 0
    stops: tuple[CompiledStops, ...] = ()
    """The same object for all answers that share it."""
    chars: int = 0


class FrontendStage:
    """The API process's half of a feature. Called from several threads, so it keeps nothing of a request. What it
    raises fails the request with status 500, by the names of stage and plugin.
    """

    name: str = ""
    fields: tuple[str, ...] = ()
    """Those of `STAGE_FIELDS` and `SAMPLING_FIELDS` that it serves. Without it requests with them are refused."""

    def expander(self, info: ModelInfo) -> PromptExpander | None:
        """Whenever the engine has started: return what the stage does with prompts of this model; None: nothing."""
        return None

    def service(self, info: ModelInfo) -> object | None:
        """Whenever the engine has started: return what the stage offers API plugins (`EngineClient.services`)."""
        return None

    def figures(self, info: ModelInfo) -> Mapping[str, object]:
        """Whenever the server is asked for its figures, which has them under the stage's name: plain values."""
        return {}

    def max_body_bytes(self, info: ModelInfo) -> int:
        """Once, before the APIs are built: return the largest body that a request with items may have, in bytes. What
        is in it beside strings in base64 still has `server.max_body_bytes` at most.
        """
        return 0

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> object | None:
        """Once per request, when its fields are checked: return what the Stage is to know of it, anything that msgspec
        encodes; None: nothing. `length` is the prompt's in tokens. Raise InvalidRequest, naming the field, for what
        cannot be served.
        """
        return None

    def compile_stops(self, sampling: SamplingParams) -> CompiledStops | None:
        """Before a request's prompt becomes tokens, beside the loop, and again for its output: check and compile those
        of `SAMPLING_FIELDS` that end it by its text. Return the same object for equal ones, as long as it is in use.
        Raise InvalidRequest, naming the field, for what cannot be served.
        """
        return None

    def price(self, feature: msgspec.Raw, message: TokenizedRequest, info: ModelInfo) -> Price:
        """Once or twice per request with a feature of this stage: return what its answer will cost."""
        return Price()

    def finish(self, chunk: OutputChunk, whole: msgspec.Raw | None, rows: Sequence[msgspec.Raw]) -> None:
        """For each chunk to which `Stage.send` added something: put it into the chunk's fields."""

    def close(self) -> None:
        """At the end, perhaps twice: end helper processes, and what waits for them."""
