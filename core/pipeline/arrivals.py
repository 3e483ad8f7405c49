"""Arrivals: from a message to a Req, or to a refusal that says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.messages import Rejected, TokenizedRequest
from pegboard.core.interfaces.req import Req, ReqLogprobs
from pegboard.toolkit.text.encoding import overflow

if TYPE_CHECKING:
    from numpy.typing import NDArray


def new_req(message: TokenizedRequest, eos_ids: frozenset[int], rng: np.random.Generator, now: float) -> Req:
    """Return a request's state. One without a seed of its own is given one, so that every draw has its own numbers."""
    seed = message.sampling.seed
    logprobs = None
    if message.logprobs is not None:
        logprobs = ReqLogprobs(top=message.logprobs, token_ids=tuple(message.token_ids_logprob))
    return Req(
        message.rid,
        ids_of(message),
        message.sampling,
        eos_ids=eos_ids,
        namespace=message.namespace,
        priority=message.priority,
        stream=message.stream,
        seed=int(rng.integers(2**62)) if seed is None else seed,
        logprobs=logprobs,
        params=message.params,
        name=message.name,
        arrived=now,
        principal=message.principal,
        model=message.model,
    )


def ids_of(message: TokenizedRequest) -> NDArray[np.int64]:
    """Return the prompt's token ids."""
    return np.frombuffer(message.prompt, dtype="<i4").astype(np.int64)


def refusal(message: TokenizedRequest, status: int, code: str, text: str, *, param: str = "") -> Rejected:
    """Return the answer to a request of which nothing is kept."""
    return Rejected(rid=message.rid, status=status, code=code, message=text, param=param)


def bad_length(message: TokenizedRequest, max_context_len: int) -> Rejected | None:
    """Return a refusal where the prompt is empty, leaves no room for a token, or wants more of them than a row holds;
    intake has seen to all of that, unless it still thinks of a scheduler that had more memory.
    """
    length, wanted = len(message.prompt) // 4, message.sampling.max_new_tokens or 0
    if not length:
        return refusal(message, 400, "empty_prompt", "the prompt is empty", param="prompt")
    most = max_context_len - (message.sampling.max_new_tokens != 0)
    if length <= most and length + wanted <= max_context_len:
        return None
    too_long = length > most
    # A request that wants more tokens than there are is blamed for that, where its prompt alone would fit.
    text = overflow(length, most if too_long else max(0, max_context_len - wanted), max_context_len)
    if not too_long:
        text += f", and max_new_tokens asks for {wanted} of them"
    param = "prompt" if too_long else "max_new_tokens"
    return refusal(message, 400, "context_length_exceeded", text, param=param)


@dataclass(slots=True)
class QueueBounds:
    """How much may wait; None: any. What has one of the `places` among the running, and tokens that KV `memory` holds,
    do not count as waiting: they are about to start.
    """

    places: int
    memory: int
    requests: int | None
    tokens: int | None

    def set_open(self, requests: int, fills: int) -> None:
        """Set what the config leaves open: so many requests may wait, and tokens that fill KV memory so many times."""
        self.requests = self.requests or requests
        self.tokens = self.tokens or fills * self.memory

    @property
    def most_requests(self) -> int | None:
        """Requests that may run and wait; None: any number."""
        return None if self.requests is None else self.places + self.requests

    @property
    def most_tokens(self) -> int | None:
        """Tokens that their prompts may have; None: any number."""
        return None if self.tokens is None else self.memory + self.tokens

    def refuse(self, message: TokenizedRequest, requests: int, tokens: int) -> Rejected | None:
        """Return a refusal where so many run and wait that with this one more would wait than may."""
        if self.most_requests is not None and requests >= self.most_requests:
            return refusal(message, 503, "queue_full", f"{self.requests} requests are waiting, try again later")
        length = len(message.prompt) // 4
        if self.most_tokens is not None and tokens + length > self.most_tokens:
            return refusal(message, 503, "queue_full", f"prompts of {self.tokens} tokens are waiting, try again later")
        return None
