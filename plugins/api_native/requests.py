"""The body of /generate, and what it asks of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import ConfigDict, WithJsonSchema

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.plugins.api_native.bodies import PromptBody, each
from pegboard.plugins.api_native.unsupported import GENERATE, HARMLESS, HARMLESS_TO_SAMPLING, SAMPLING
from pegboard.plugins.sessions_in_memory.api import SessionParams
from pegboard.toolkit.grammars.grammar import grammar_of
from pegboard.toolkit.http.bodies import validate_part
from pegboard.toolkit.http.generation import MAX_REQUESTS, SamplingFields, for_answer
from pegboard.toolkit.http.processors import processors_of
from pegboard.toolkit.http.refusals import RefusingModel, Unknown
from pegboard.toolkit.http.request_fields import RequestFields, with_declared
from pegboard.toolkit.media.inputs import MediaPrompt

if TYPE_CHECKING:
    from pegboard.core.interfaces.plugin import BodyField
    from pegboard.toolkit.media.service import MediaReader

Prompt = str | list[int] | MediaPrompt
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_PREFIX = "sampling_params."


class SamplingBody(SamplingFields, RefusingModel):
    """`sampling_params` of a request."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})
    unknown = Unknown.REFUSED
    refused = SAMPLING
    harmless = HARMLESS_TO_SAMPLING

    max_new_tokens: int = 128
    """Most tokens to generate; fewer where the context ends before."""
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    """The same as `seed`."""
    n: int = 1
    """How many answers to give."""
    json_schema: Any = None
    """A JSON schema, as text or as it is, that the answer must satisfy. Of this and the next three one only."""
    regex: Any = None
    """A regular expression that the whole answer must match."""
    ebnf: Any = None
    """A grammar in GBNF that the answer must follow."""
    structural_tag: Any = None
    """Structures, each with a schema, that the answer must keep to from where one of them begins."""

    def check(self) -> None:
        """Raise InvalidRequest for a number of answers that is none, or too many."""
        if not 1 <= self.n <= MAX_REQUESTS:
            raise InvalidRequest(f"n must be from 1 to {MAX_REQUESTS}, got {self.n}", param=f"{_PREFIX}n")
        if self.seed is not None and self.sampling_seed is not None and self.seed != self.sampling_seed:
            raise InvalidRequest("seed and sampling_seed are the same, and differ", param=f"{_PREFIX}sampling_seed")

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer. Raises InvalidRequest for more than one."""
        values = {name: getattr(self, name) for name in _GRAMMARS}
        return grammar_of(**values, names={name: f"{_PREFIX}{name}" for name in _GRAMMARS})

    def params(self, grammar: Grammar | None, processors: dict[str, object] | None) -> SamplingParams:
        """Return the engine's parameters. `processors` are those that the body names outside of this."""
        more = {} if processors is None else {"extra": processors}
        return self.sampling_params(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            prefix=_PREFIX,
            seed=self.seed if self.seed is not None else self.sampling_seed,
            grammar=grammar,
            **more,
        )


_SAMPLING_SCHEMA = SamplingBody.model_json_schema()


class GenerateBody(RequestFields, PromptBody):
    """Body of `/generate`: one prompt, or a batch where `text` or `input_ids` is a list of prompts. Fields about one
    prompt may then be lists, too, with an entry for each.
    """

    unsupported = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    refused = GENERATE
    harmless = HARMLESS

    sampling_params: Annotated[
        dict[str, Any] | list[dict[str, Any]],
        WithJsonSchema({"anyOf": [_SAMPLING_SCHEMA, {"type": "array", "items": _SAMPLING_SCHEMA}], "default": {}}),
    ] = {}
    stream: bool = False
    """Whether to send server-sent events while it is generated: each has the text and tokens so far, and the
    log-probabilities and hidden states of the tokens that are new in it."""
    return_logprob: bool | list[bool] = False
    """Whether to return log-probabilities, in `meta_info`, each as [value, token id, text]."""
    logprob_start_len: int | list[int] = -1
    """The prompt's token from which on to return those of the prompt, too; -1: none of them."""
    top_logprobs_num: int | list[int] = 0
    """How many of the largest ones to return at each place."""
    token_ids_logprob: list[int] | list[list[int]] = []
    """Tokens whose log-probabilities to return at each place."""
    return_text_in_logprobs: bool = False
    """Whether the text of each token stands beside its id; null otherwise."""
    return_hidden_states: bool | list[bool] = False
    """Whether to return the last hidden state after each generated token; the server's config must allow it."""
    session_params: SessionParams | None = None
    """The session, and its turn, that the prompt continues."""
    custom_logit_processor: str | dict[str, Any] | list[str | dict[str, Any]] = ""
    """As in `sampling_params`: logits processors by name, never code. Its parameters are the `custom_params` there."""
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        """Return the fields that mean something of their own here."""
        return frozenset(cls.model_fields) - frozenset(cls.not_taken())

    def with_media(self, prompts: Sequence[str | list[int]], processor: MediaReader | None) -> list[Prompt]:
        """Return the prompts with the body's media, for a model whose `processor` reads them. Raises InvalidRequest,
        with the place, for what is none.
        """
        return [*prompts]

    @property
    def in_session(self) -> bool:
        """Whether it is a turn of a session."""
        return self.session_params is not None and bool(self.session_params.id)

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error of the engine, with the field as it is called here."""
        param = error.param or ""
        head = param.partition(".")[0]
        if head == "custom_logit_processor" and self.custom_logit_processor:
            called = param
        elif head in _SAMPLING_FIELDS:
            called = f"{_PREFIX}{param}"
        else:
            called = {**_CALLED, "prompt": self.prompt_field}.get(param, param)
        return InvalidRequest(error.message, param=called or None, code=error.code, status=error.status)


def generate_body(model: type[GenerateBody], body_fields: Mapping[str, Sequence[BodyField]]) -> type[GenerateBody]:
    """Return a body with the fields that providers declare, which it does not refuse."""
    made = with_declared(model, body_fields)
    if made is not model:
        made.taken = (*model.taken, *(field.name for _, field in made.declared))
    return made


_SAMPLING_FIELDS = frozenset({*SamplingBody.model_fields, *SamplingParams.__struct_fields__})
_CALLED = {"logprob_start": "logprob_start_len", "logprobs": "top_logprobs_num"}


def engine_requests(body: GenerateBody, processor: MediaReader | None = None) -> tuple[list[GenerateRequest], bool]:
    """Return what to submit, and whether the answer is a list: of prompts times `n`, prompt by prompt. `processor`
    reads the media of a model that takes some. Raises InvalidRequest for what no engine could do; the rest is found out
    where it is submitted.
    """
    body.check_supported()
    prompts = body.prompts()
    count = len(prompts)
    if count > MAX_REQUESTS:
        # Before anything is made of each.
        raise InvalidRequest(f"at most {MAX_REQUESTS} prompts, got {count}", param=body.prompt_field)
    samplings = _samplings(body.sampling_params, count)
    total = sum(sampling.n for sampling in samplings)
    if body.in_session and total > 1:
        param = "sampling_params.n" if count == 1 else "session_params"
        raise InvalidRequest(f"a turn of a session is one prompt with one answer, got {total}", param=param)
    if total > MAX_REQUESTS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_REQUESTS}, got {total}", param=body.prompt_field)
    rids = body.rids([sampling.n for sampling in samplings])
    made: dict[int, SamplingParams] = {}
    params_of = body.params_of([sampling.n for sampling in samplings])
    adapters = body.adapters(count)
    requests: list[GenerateRequest] = []
    asked = body.with_media(prompts, processor)
    for prompt, sampling, wanted, adapter in zip(asked, samplings, _wanted(body, count), adapters, strict=True):
        if id(sampling) not in made:
            made[id(sampling)] = sampling.params(sampling.grammar(), _processors(body, sampling))
        params = made[id(sampling)]
        for answer in range(sampling.n):
            request = GenerateRequest(
                prompt=prompt,
                sampling=for_answer(params, answer),
                rid=rids[len(requests)],
                stream=body.stream,
                priority=body.priority,
                cache_salt=body.salt,
                params={**params_of[len(requests)], **adapter},
            )
            requests.append(msgspec.structs.replace(request, **wanted))
    return requests, body.batch or total > 1


def _samplings(given: dict[str, Any] | list[dict[str, Any]], count: int) -> list[SamplingBody]:
    """Return what `sampling_params` says of each prompt; the same object where it is said once for all."""
    several = each(given, count, "sampling_params")
    return [_sampling(one) for one in several] if isinstance(given, list) else [_sampling(given)] * count


def _sampling(given: dict[str, Any]) -> SamplingBody:
    try:
        sampling = validate_part(given, SamplingBody, "sampling_params")
    except InvalidRequest as error:
        if (error.param or "").startswith(_PREFIX):
            raise
        text = f"{_PREFIX}{error.message}"
        raise InvalidRequest(text, param=f"{_PREFIX}{error.param}", code=error.code) from None
    sampling.check()
    return sampling


def _wanted(body: GenerateBody, count: int) -> list[dict[str, Any]]:
    """Return what each prompt's request wants to be told beyond text: fields of GenerateRequest."""
    logprobs = each(body.return_logprob, count, "return_logprob")
    tops = each(body.top_logprobs_num, count, "top_logprobs_num")
    starts = each(body.logprob_start_len, count, "logprob_start_len")
    hidden = each(body.return_hidden_states, count, "return_hidden_states")
    ids: Any = body.token_ids_logprob
    chosen = each(ids, count, "token_ids_logprob") if ids and isinstance(ids[0], list) else [ids] * count
    found = []
    for want, top, start, tokens, states in zip(logprobs, tops, starts, chosen, hidden, strict=True):
        if top < 0:
            raise InvalidRequest(f"top_logprobs_num must be at least 0, got {top}", param="top_logprobs_num")
        if start < -1:
            raise InvalidRequest(f"logprob_start_len must be at least -1, got {start}", param="logprob_start_len")
        if start >= 0 and not want:
            raise InvalidRequest("logprob_start_len is for requests with return_logprob", param="logprob_start_len")
        asked: dict[str, Any] = {"return_hidden_states": states}
        if want:
            start_at = start if start >= 0 else None
            asked |= {"logprobs": top, "logprob_start": start_at, "token_ids_logprob": tuple(tokens)}
        found.append(asked)
    return found


def _processors(body: GenerateBody, sampling: SamplingBody) -> dict[str, Any] | None:
    """Return the logits processors that the body names itself; None where it names none."""
    if not body.custom_logit_processor:
        return None
    if sampling.custom_logit_processor:
        raise InvalidRequest(
            "custom_logit_processor is given twice: here and in sampling_params", param="custom_logit_processor"
        )
    try:
        return processors_of(body.custom_logit_processor, sampling.custom_params)
    except InvalidRequest as error:
        if error.param == "custom_params":
            error.param = f"{_PREFIX}custom_params"
        raise
