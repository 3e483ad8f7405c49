"""What the bodies of chat and text completions share: OpenAI's fields, and the field's usual extras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.constraints import AskedGrammar, ConstraintFields
from pegboard.plugins.api_openai.formats import asked_format
from pegboard.plugins.sessions_in_memory.api import SessionParams
from pegboard.toolkit.grammars.grammar import grammar_of
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.generation import MAX_REQUESTS, SamplingFields, for_answer
from pegboard.toolkit.http.refusals import RefusingModel
from pegboard.toolkit.http.request_fields import RequestFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import Grammar, SamplingParams
    from pegboard.plugins.api_openai.surface import Prompt

MAX_TOP_LOGPROBS = 20
MAX_N = 128

GRAMMARS: dict[str, str] = {
    "json_schema": "response_format.json_schema.schema",
    "json_object": "response_format",
    "structural_tag": "response_format",
}
"""What grammars are called in a body."""


class StreamOptions(RequestModel):
    """`stream_options`."""

    include_usage: bool = False
    """Whether the stream ends with a chunk that counts tokens."""
    continuous_usage_stats: bool = False
    """Whether every chunk counts the tokens of its choice so far."""


class CommonBody(RequestFields, SamplingFields, ConstraintFields, RefusingModel):
    """Fields that both have. A subclass adds its prompt, and says what the engine's fields are called in it."""

    model: str = ""
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    min_tokens: int = 0
    rid: str = ""
    response_format: dict[str, Any] = {}
    """`{"type": "text" | "json_object" | "json_schema" | "structural_tag", ...}`; `json_object` may have a `schema`."""
    regex: str | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None
    """How many of the largest logprobs to give of each token of the prompt, beside its own."""
    return_hidden_states: bool = False
    session_params: SessionParams | None = None
    """The session's turn that this one continues."""
    lora_path: Any = None

    def check(self, prompts: int = 1) -> None:
        """Raise InvalidRequest for what is impossible, or would change the answer and is not supported."""
        _check_range("n", self.n, 1, MAX_N)
        if prompts * self.copies > MAX_REQUESTS:
            raise InvalidRequest(f"prompts times n must be at most {MAX_REQUESTS}", param="n")
        if self.session_params is not None and self.session_params.id and prompts * self.copies > 1:
            many, what = ("n", "answer") if self.copies > 1 else ("prompt", "prompt")
            raise InvalidRequest(f"{many}: a turn of a session has one {what}", param=many)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for requests with stream: true", param="stream_options")
        for name in ("max_tokens", "min_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise InvalidRequest(f"{name} must be at least 0, got {getattr(self, name)}", param=name)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
            if self.stream:
                raise InvalidRequest("prompt_logprobs are not for streams", param="prompt_logprobs")
        if self.return_token_ids and self.session_params is not None and self.session_params.id:
            raise InvalidRequest("return_token_ids is not for turns of a session", param="return_token_ids")
        if self.lora_path:
            raise InvalidRequest("lora_path is not supported by this server", param="lora_path", code="unsupported")

    @property
    def copies(self) -> int:
        """How many answers the engine generates for each prompt."""
        return self.n

    @property
    def top_wanted(self) -> int | None:
        """How many logprobs of each output token to show beside its own; None for none at all."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has usage."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def grammar(self) -> Grammar | None:
        """Return what the answer must look like. Raises InvalidRequest for two grammars, or for a malformed format."""
        found = self._grammars()
        if len(found) > 1:
            fields = " and ".join(dict.fromkeys(one.name for one in found))
            raise InvalidRequest(f"one grammar per request: {fields} exclude each other", param=found[1].name)
        if not found:
            return None
        asked: dict[str, Any] = {found[0].kind: found[0].value}
        return grammar_of(**asked, names=self.grammar_names)

    def _grammars(self) -> list[AskedGrammar]:
        """Return all that are asked for."""
        found = [*self.constraints]
        if self.ebnf is not None:
            found.insert(0, AskedGrammar("ebnf", "ebnf", self.ebnf))
        if self.regex is not None:
            found.insert(0, AskedGrammar("regex", "regex", self.regex))
        if (form := asked_format(self.response_format, "response_format")) is not None:
            found.insert(0, form)
        return found

    @property
    def grammar_names(self) -> dict[str, str]:
        """What grammars, and parameters of processors, are called in this body."""
        return {**GRAMMARS, **self.processor_names, **{one.kind: one.name for one in self._grammars()}}

    def engine_requests(
        self,
        prompts: Sequence[Prompt],
        *,
        rid: str,
        max_new_tokens: int | None,
        add_special_tokens: bool,
        logprob_start: int | None = None,
        params: Mapping[str, object] | None = None,
        **sampling: object,
    ) -> list[GenerateRequest]:
        """Return prompts times `copies`, prompt by prompt; those of one HTTP request are called ``<rid>_<number>``.
        `params` are further ones, for plugins; `sampling` takes precedence over the body's fields.
        """
        total = len(prompts) * self.copies
        if self.prompt_logprobs is not None:
            logprob_start = 0
        tops = [one for one in (self.top_wanted, self.prompt_logprobs) if one is not None]
        params_of = self.params_of([self.copies] * len(prompts))
        if params:
            params_of = [{**own, **params} for own in params_of]
        asked = self._sampling(max_new_tokens=max_new_tokens, min_new_tokens=self.min_tokens, **sampling)
        return [
            GenerateRequest(
                prompt=prompt,
                sampling=for_answer(asked, answer),
                rid=rid if total == 1 else f"{rid}_{i * self.copies + answer}",
                stream=self.stream,
                priority=self.priority,
                cache_salt=self.salt,
                logprobs=max(tops, default=None),
                logprob_start=logprob_start,
                return_hidden_states=self.return_hidden_states,
                add_special_tokens=add_special_tokens,
                params=params_of[i * self.copies + answer],
                model=self.model,
            )
            for i, prompt in enumerate(prompts)
            for answer in range(self.copies)
        ]

    def _sampling(self, **values: Any) -> SamplingParams:
        """Return the body's sampling parameters, with those of processors; `values` take precedence."""
        params = self.sampling_params(**values)
        return msgspec.structs.replace(
            params,
            extra=self.processor_params(params.extra),
            no_stop_trim=params.no_stop_trim or self.include_stop_str_in_output,
        )


def check_top(name: str, value: int) -> None:
    """Raise InvalidRequest for a number of logprobs that no request gets."""
    _check_range(name, value, 0, MAX_TOP_LOGPROBS)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {value}", param=name)
