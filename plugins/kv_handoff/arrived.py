"""What a gate brings for a request, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.interfaces.step import TokenValues

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a gate has brought into a request's reserved memory: KV of its first `length` tokens, and the token that was
    sampled after its prompt elsewhere, with its `values`. With a token, `length` is the whole prompt; without one
    (None) the KV is cached, and the rest of the prompt is computed here.
    """

    length: int
    token: int | None = None
    values: TokenValues = field(default_factory=TokenValues)


def why_unusable(req: Req, arrived: Arrived, vocab_size: int, *, reserved: bool) -> str:
    """Return why what was brought cannot be used for a request; "" where it can. `reserved`: whether the request has
    memory.
    """
    if not reserved:
        return "KV has arrived for a request without reserved memory"
    if arrived.token is None:
        return "" if 0 <= arrived.length <= req.input_len else f"KV of {arrived.length} of {req.input_len} tokens"
    if arrived.length != req.input_len:
        return f"a token behind {arrived.length} of {req.input_len} tokens"
    if not 0 <= arrived.token < vocab_size:
        return f"the token {arrived.token} is not among the model's {vocab_size}"
    if req.logprobs is not None and arrived.values.logprob is None:
        return "a token without the logprob that was asked for"
    return ""
