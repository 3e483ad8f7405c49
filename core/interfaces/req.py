"""Req: one request's whole state in the scheduler, in a few owned parts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from pegboard.core.interfaces.keys import PrefixKey, PrefixMemo
from pegboard.core.interfaces.status import FinishReason, ReqStatus, check_transition

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.prefix_cache import CacheHandle
    from pegboard.core.interfaces.sampling import SamplingParams

T = TypeVar("T")

NO_ROW = -1

SINGLE = 64
"""In `Req.flags`: each of its tokens is drawn in a row of its own."""

WHOLE_PREFIX = 2**62
"""For `Req.reusable` and `Stage.reusable`: a cached prefix may cover all that it can."""


class ReqSlot(Generic[T]):
    """A plugin's typed place in every request, so that no feature adds a field to the core.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Visits:
    ...     count: int = 0
    >>> VISITS = ReqSlot(Visits)  # once, at module level
    >>> # later: VISITS.of(req).count += 1

    `of` makes the value with the factory at first use; `peek` gives None instead; `clear` drops it.
    """

    _ids = itertools.count()

    def __init__(self, factory: Callable[[], T]) -> None:
        self._factory = factory
        self._id = next(self._ids)

    def of(self, req: Req) -> T:
        value = req.slots.get(self._id)
        if value is None:
            value = req.slots[self._id] = self._factory()
        return value

    def peek(self, req: Req) -> T | None:
        return req.slots.get(self._id)

    def clear(self, req: Req) -> None:
        req.slots.pop(self._id, None)


class TokenBuffer:
    """Prompt and output tokens of a request in one growing int64 array; views instead of copies."""

    __slots__ = ("_data", "_len")

    def __init__(self, prompt_ids: NDArray[np.int64], room: int = 64) -> None:
        self._len = int(prompt_ids.shape[0])
        self._data = np.empty(self._len + room, dtype=np.int64)
        self._data[: self._len] = prompt_ids

    def __len__(self) -> int:
        return self._len

    @property
    def last(self) -> int:
        """The newest token."""
        return int(self._data[self._len - 1])

    def append(self, token: int) -> None:
        if self._len == self._data.shape[0]:
            self._data = np.concatenate([self._data, np.empty(max(64, self._len // 2), dtype=np.int64)])
        self._data[self._len] = token
        self._len += 1

    def view(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return tokens [start, stop) as a view, valid until the next append."""
        return self._data[start : self._len if stop is None else min(stop, self._len)]

    def key_view(self, stop: int | None = None) -> NDArray[np.int64]:
        """Return what identifies the first `stop` tokens to prefix caches, as a view: here the tokens themselves."""
        return self.view(0, stop)

    def is_keyed(self, place: int) -> bool:
        """Return whether something else than its id identifies a token: its id does not say what to compute."""
        return False


class KeyedTokens(TokenBuffer):
    """A TokenBuffer with a second lane: what identifies each token to prefix caches, where that is not its id."""

    __slots__ = ("_keys",)

    def __init__(self, prompt_ids: NDArray[np.int64], keys: NDArray[np.int64], room: int = 64) -> None:
        super().__init__(prompt_ids, room)
        self._keys = TokenBuffer(keys, room)

    def append(self, token: int) -> None:
        super().append(token)
        self._keys.append(token)

    def key_view(self, stop: int | None = None) -> NDArray[np.int64]:
        return self._keys.view(0, stop)

    def is_keyed(self, place: int) -> bool:
        return int(self._keys.view(place, place + 1)[0]) != int(self.view(place, place + 1)[0])


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Positions that are not indices, on one or several axes, as M-RoPE has them: `prompt` int64 [axes, prompt tokens],
    the axes those that the model reads. Token i of the output, counted from the prompt's beginning, stands at i +
    `delta` on all of them.
    """

    prompt: NDArray[np.int64]
    delta: int

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions int64 [axes, stop - start] of tokens, those of the output included."""
        axes, length = self.prompt.shape
        known = self.prompt[:, start : min(stop, length)]
        if stop <= length:
            return known
        later = np.arange(max(start, length), stop) + self.delta
        return np.concatenate([known, np.broadcast_to(later, (axes, later.shape[0]))], axis=1)


@dataclass(slots=True)
class ReqKV:
    """Where a request's KV is.

    `row` is its row in the row table (NO_ROW when it holds none). The first `allocated_len` entries of the row are
    valid slots, of which the first `committed_len` hold computed KV. The first `cache_len` slots (whole pages) belong
    to the prefix cache and stay in place while `handle` is locked; the others belong to the request.
    `prefix_len` tokens were found in the cache when the request was last admitted. While its prompt is prefilled,
    `scheduled_len` is what `committed_len` will be once the steps under way are through. `load` brings those of the
    prefix that the cache has promised; they count as computed once the step that it goes along with is committed.
    """

    row: int = NO_ROW
    prefix_len: int = 0
    committed_len: int = 0
    scheduled_len: int = 0
    allocated_len: int = 0
    cache_len: int = 0
    handle: CacheHandle | None = None
    load: object | None = None


@dataclass(slots=True)
class ReqOutput:
    """What has been generated and what of it was already sent. `cached_from` says how
    many of the `cached_tokens` were loaded, by where they came from (`PrefixMatch.promised_from`).

    `sent_len` counts output tokens that left the scheduler, so that a retracted request never repeats one.
    """

    sent_len: int = 0
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    cached_from: Mapping[str, int] = field(default_factory=dict)
    num_retractions: int = 0


@dataclass(slots=True)
class ReqLogprobs:
    """Logprobs, kept for requests that want them: `values`, `tops` and `chosen` have one entry per output token."""

    top: int = 0
    token_ids: tuple[int, ...] = ()
    values: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    chosen: list[list[tuple[float, int]]] = field(default_factory=list)


@dataclass(slots=True)
class ReqTiming:
    """Times by the scheduler's clock, in seconds; 0.0 where it has not happened yet.

    `ready` is when the last gate let it into the queue (`arrived` where there is none), `queued` when it last entered
    the queue (again after a retraction). `waiting_since` is what aging counts from.
    """

    arrived: float = field(default_factory=time.monotonic)
    ready: float = 0.0
    queued: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0

    @property
    def waiting_since(self) -> float:
        """When it first entered the queue. A retraction does not change that: a retracted request keeps its turn."""
        return self.ready or self.arrived


class Req:
    """One request. Lives in the scheduler; only the pipeline changes it, and `Stage.arrive` what it may set.

    `name` is what its client calls it, which for another key's client may be something else; `rid` is unique.
    `tokens` holds prompt then output; `input_len` is the prompt's length. `eos_ids` are the tokens that end it.
    `namespace` separates cached prefixes that must not be shared. A larger `priority` is more urgent. `params` is what
    the request says to plugins, by the name of the provider meant. `principal` says who asks: the name of the API key,
    never the key; "" on a server without keys. `model` is the served name that it was asked for. `flags` are the
    pipeline's own notes. `samples` False: it gets no token and ends with its prompt. Of a cached prefix at most
    `reusable` tokens are used; see `Stage.reusable`. `positions` is None where tokens stand at their indices.
    """

    __slots__ = (
        "blocked_by",
        "eos_ids",
        "flags",
        "input_len",
        "kv",
        "logprobs",
        "memo",
        "model",
        "name",
        "namespace",
        "output",
        "params",
        "positions",
        "principal",
        "priority",
        "reusable",
        "rid",
        "samples",
        "sampling",
        "seed",
        "slots",
        "status",
        "stream",
        "timing",
        "tokens",
    )

    def __init__(
        self,
        rid: str,
        prompt_ids: NDArray[np.int64],
        sampling: SamplingParams,
        *,
        eos_ids: frozenset[int] = frozenset(),
        namespace: str = "",
        priority: int = 0,
        stream: bool = False,
        seed: int = 0,
        samples: bool = True,
        logprobs: ReqLogprobs | None = None,
        params: Mapping[str, Any] | None = None,
        name: str = "",
        arrived: float | None = None,
        principal: str = "",
        model: str = "",
    ) -> None:
        self.rid = rid
        self.name = name or rid
        self.tokens = TokenBuffer(prompt_ids)
        self.positions: TokenPositions | None = None
        self.input_len = int(prompt_ids.shape[0])
        self.sampling = sampling
        self.eos_ids = eos_ids
        self.namespace = namespace
        self.priority = priority
        self.stream = stream
        self.seed, self.samples, self.reusable = seed, samples, WHOLE_PREFIX
        self.logprobs = logprobs
        self.output, self.kv = ReqOutput(), ReqKV()
        self.principal, self.model = principal, model
        self.params: Mapping[str, Any] = params or {}
        self.timing = ReqTiming() if arrived is None else ReqTiming(arrived)
        self.status = ReqStatus.WAITING
        self.blocked_by, self.flags = "", 0
        self.slots: dict[int, Any] = {}
        self.memo = PrefixMemo()

    @property
    def seq_len(self) -> int:
        """Prompt and output tokens together."""
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        return self.tokens._len - self.input_len  # several times per request and step: no call

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        return self.tokens.view(0, self.input_len)

    @property
    def output_ids(self) -> NDArray[np.int64]:
        return self.tokens.view(self.input_len)

    @property
    def single(self) -> bool:
        """Whether something is wanted of each output token that only the model can say: none is taken without it."""
        return self.logprobs is not None or bool(self.flags & SINGLE)

    @property
    def finished(self) -> bool:
        """Whether its end is decided. Its status is FINISHED only once all that it had is free."""
        return self.output.finish_reason is not None

    @property
    def remaining_tokens(self) -> int:
        """How many tokens it may still generate (max_new_tokens is always set after intake)."""
        limit = self.sampling.max_new_tokens
        return 0 if limit is None else max(0, limit - self.output_len)

    def key(self, length: int | None = None) -> PrefixKey:
        """Return its cache key over the first `length` tokens (all by default)."""
        return PrefixKey(self.tokens.key_view(length), self.namespace, self.memo)

    def matchable_key(self) -> PrefixKey:
        """Return what a cached prefix may cover: all but one token, whose logits are needed, and what stages need."""
        return self.key(max(0, min(self.seq_len - 1, self.reusable)))

    def move_to(self, status: ReqStatus) -> None:
        """Change the status; an illegal transition raises IllegalTransition."""
        check_transition(self.rid, self.status, status)
        self.status = status

    def __repr__(self) -> str:
        return f"Req({self.rid}, {self.status.value}, {self.input_len}+{self.output_len} tokens)"
