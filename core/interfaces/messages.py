"""Messages between API process and scheduler process: msgspec structs, MessagePack on the wire, never pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages; the tag is the class's name."""


class TokenizedRequest(Message):
    """A validated, tokenised request. `prompt` is int32 little-endian token ids; `max_new_tokens` is set by intake.
    `rid` is unique; `name` is what its client calls
    it, where that is something else. `principal` says who asks: the name of the API key, "" without one. `model` is the
    served name that it was asked for. `features` is what stages of the API process send to theirs in the scheduler, by
    their names.
    """

    rid: str
    prompt: bytes
    sampling: SamplingParams
    stream: bool = False
    priority: int = 0
    namespace: str = ""
    logprobs: int | None = None
    token_ids_logprob: tuple[int, ...] = ()
    name: str = ""
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    principal: str = ""
    model: str = ""
    features: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class TokenizedBatch(Message):
    """Several requests that arrived together, as one message."""

    requests: list[TokenizedRequest]


class AbortRequest(Message):
    """Abort `rid`, or everything."""

    rid: str = ""
    all_requests: bool = False


class ControlRequest(Message):
    """Ask the scheduler to do something between two steps: `flush_cache`, `info`, `drain`."""

    call_id: int
    action: str
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class Shutdown(Message):
    """Finish nothing more and exit."""


class Accepted(Message):
    """The request is in the waiting queue."""

    rid: str


class Rejected(Message):
    """The request was refused; nothing is kept of it."""

    rid: str
    status: int
    code: str
    message: str
    param: str = ""


class TokenOutput(Message):
    """New tokens of one request, and its end. Only tokens not sent before; `logprobs` as in OutputChunk. What stages
    add, by their names: `features` of the whole output, and `rows` with an entry per token (see `Sent`).

    The first output of a request and the last one have all counters. One without them (`has_counters`) is the steady
    stream of a decode: its reader adds the tokens to `completion_tokens`, and the other counters are as before.
    """

    rid: str
    token_ids: list[int]
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_from: dict[str, int] | None = None
    num_retractions: int = 0
    logprobs: list[tuple[float, int, list[tuple[float, int]]]] | None = None
    features: dict[str, msgspec.Raw] | None = None
    rows: dict[str, list[msgspec.Raw]] | None = None

    @property
    def has_counters(self) -> bool:
        return self.completion_tokens > 0 or self.prompt_tokens > 0


class TokenOutputs(Message):
    """All outputs of one step."""

    outputs: list[TokenOutput]


class ControlReply(Message):
    """Answer to a ControlRequest."""

    call_id: int
    ok: bool
    payload: dict[str, Any] = msgspec.field(default_factory=dict)

    def check(self, action: str) -> None:
        """Raise InvalidRequest where the action was refused or has failed."""
        told = self.payload
        if not self.ok:
            message, code = told.get("message") or f"{action} was refused", told.get("code") or "refused"
            raise InvalidRequest(
                str(message), param=told.get("param"), code=str(code), status=told.get("status") or 400
            )


class Ready(Message):
    """The scheduler has loaded its model. `info` holds ModelInfo's fields; `directory` is the prepared model."""

    info: dict[str, Any]
    directory: str


class StartFailed(Message):
    """The scheduler could not start; `message` is for the operator. `temporary`: another start may mend it."""

    message: str
    temporary: bool = False


ToScheduler = TokenizedRequest | TokenizedBatch | AbortRequest | ControlRequest | Shutdown
FromScheduler = Accepted | Rejected | TokenOutputs | ControlReply | Ready | StartFailed
