"""Answers of /generate, as they are written and as the OpenAPI document describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, RootModel, WithJsonSchema

from pegboard.plugins.api_native.bodies import Described

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pegboard.core.interfaces.client import GenerateRequest, Logprob, OutputChunk
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.toolkit.http.generation import Answer

Entry = tuple[float | None, int, str | None]
"""Log-probability, token id, text. The first is null where nothing precedes the token, and for minus infinity."""

_Shown = Annotated[
    Entry,
    WithJsonSchema(
        {
            "type": "array",
            "description": "[log-probability, token id, text]",
            "items": {"type": ["number", "string", "null"]},
            "minItems": 3,
            "maxItems": 3,
        }
    ),
]


class FinishReason(Described):
    """Why an answer ended: `matched` is the stop token's id or the stop string, `length` the number of tokens."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class CachedTokens(Described):
    """Where they lay. `host` and `storage` are told where they had some of them."""

    device: int = 0
    host: int | None = None
    storage: int | None = None


class MetaInfo(Described):
    """What is told of an answer beside its text. Lists of log-probabilities have an entry per token."""

    id: str
    """The request's id."""
    finish_reason: FinishReason | None = None
    """null while more is to come."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose KV was there already."""
    cached_tokens_details: CachedTokens | None = None
    image_tokens: int | None = None
    """Those of the prompt's tokens that are pictures, where there are any; the same of videos."""
    video_tokens: int | None = None
    num_retractions: int
    """How often it had to give its memory to others."""
    spec_verify_ct: int | None = None
    """Passes that the answer took, where tokens of it were drafted; the other figures of drafts, too, are there then
    only."""
    spec_accept_length: float | None = None
    """Tokens per pass."""
    spec_accept_rate: float | None = None
    """Share of the drafted tokens that were accepted."""
    spec_draft_token_num: int | None = None
    spec_accept_token_num: int | None = None
    weight_version: str
    """That of the weights of the last token."""
    weight_version_start: str | None = None
    """That of the weights of the first one, where it was another."""
    e2e_latency: float
    """Seconds since the request came."""
    input_token_logprobs: list[_Shown] | None = None
    """Of the prompt, from `logprob_start_len` on; empty where that was -1."""
    output_token_logprobs: list[_Shown] | None = None
    input_top_logprobs: list[list[_Shown] | None] | None = None
    output_top_logprobs: list[list[_Shown] | None] | None = None
    input_token_ids_logprobs: list[list[_Shown] | None] | None = None
    output_token_ids_logprobs: list[list[_Shown] | None] | None = None
    hidden_states: list[list[float | None]] | None = None
    """The last hidden state after each generated token."""
    extra: dict[str, object] | None = None
    """What stages of plugins tell of the answer, by their names."""


class Generated(Described):
    """One answer."""

    text: str
    output_ids: list[int]
    """All generated tokens, also those that stop strings cut off."""
    meta_info: MetaInfo
    index: int | None = Field(None, description="In streams of several answers: which of them.")


class GeneratedAnswer(RootModel[Generated | list[Generated]]):
    """One answer; a list of them for a batch, or for several answers to one prompt."""


def _cached(answer: Answer) -> dict[str, int]:
    """Return the cached tokens by where they lay."""
    host, storage = answer.cached_from.get("host", 0), answer.cached_from.get("storage", 0)
    device = {"device": answer.cached_tokens - host - storage}
    return {**device, "host": host, "storage": storage} if host or storage else device


def _speculation(answer: Answer) -> dict[str, Any]:
    """Return what is told of drafts, by the names that clients know; nothing where there were none."""
    if not answer.drafted_tokens:
        return {}
    passes = answer.completion_tokens - answer.accepted_tokens
    return {
        "spec_verify_ct": passes,
        "spec_accept_length": answer.completion_tokens / max(1, passes),
        "spec_accept_rate": answer.accepted_tokens / answer.drafted_tokens,
        "spec_draft_token_num": answer.drafted_tokens,
        "spec_accept_token_num": answer.accepted_tokens,
    }


class Responder:
    """Writes answers of one HTTP request."""

    def __init__(self, tokenizer: Tokenizer, *, text_in_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._texts = text_in_logprobs

    def answer(self, request: GenerateRequest, answer: Answer, latency: float) -> dict[str, Any]:
        """Return a whole answer; `latency` in seconds since the request came."""
        body = self._body(answer, latency, answer.extra)
        meta = body["meta_info"]
        if request.logprobs is not None:
            self._add_logprobs(meta, "input", answer.input_logprobs, request)
            self._add_logprobs(meta, "output", answer.logprobs, request)
        if request.return_hidden_states:
            meta["hidden_states"] = answer.hidden_states
        return body

    def event(self, request: GenerateRequest, answer: Answer, chunk: OutputChunk, latency: float) -> dict[str, Any]:
        """Return an answer so far, with the logprobs, hidden states and values of stages that `chunk` brings."""
        body = self._body(answer, latency, chunk.extra)
        meta = body["meta_info"]
        if request.logprobs is not None:
            if chunk.input_logprobs is not None:
                self._add_logprobs(meta, "input", chunk.input_logprobs, request)
            self._add_logprobs(meta, "output", chunk.logprobs or (), request)
        if request.return_hidden_states:
            meta["hidden_states"] = chunk.hidden_states or []
        return body

    @staticmethod
    def _body(answer: Answer, latency: float, extra: Mapping[str, object] | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": answer.rid,
            "finish_reason": _finish_reason(answer),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "cached_tokens": answer.cached_tokens,
            "cached_tokens_details": _cached(answer),
            "num_retractions": answer.num_retractions,
            **{f"{kind}_tokens": count for kind, count in sorted(answer.media_tokens.items())},
            **_speculation(answer),
            **answer.weights,
            "e2e_latency": latency,
        }
        if told := {name: one for name, one in (extra or {}).items() if name not in meta}:
            meta["extra"] = told
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}

    def _add_logprobs(
        self, meta: dict[str, Any], which: str, found: Sequence[Logprob], request: GenerateRequest
    ) -> None:
        top = request.logprobs or 0
        meta[f"{which}_token_logprobs"] = [self._entry(value, token) for value, token, _ in found]
        if top:
            meta[f"{which}_top_logprobs"] = [self._entries(one, 0, top) for one in found]
        if request.token_ids_logprob:
            # They follow the top ones.
            meta[f"{which}_token_ids_logprobs"] = [self._entries(one, top, None) for one in found]

    def _entries(self, found: Logprob, start: int, end: int | None) -> list[Entry] | None:
        """null for a prompt's first token, which has no distribution to look into."""
        value, _, more = found
        return None if value is None else [self._entry(*one) for one in more[start:end]]

    def _entry(self, value: float | None, token: int) -> Entry:
        text = self._tokenizer.decode([token], skip_special_tokens=False) if self._texts else None
        return value, token, text


def _finish_reason(answer: Answer) -> dict[str, object] | None:
    reason = answer.finish_reason
    if reason is not None and reason.get("type") == "length":
        return {**reason, "length": answer.completion_tokens}
    return reason
