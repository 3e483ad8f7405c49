"""Bodies of the native routes, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.toolkit.generation import MAX_REQUESTS, SamplingFields, salt_of
from pegboard.core.toolkit.http import RequestModel, validate_part


class SamplingBody(SamplingFields):
    """`sampling_params` of a request."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    n: int = 1
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    def params(self, answer: int = 0, processor: Any = "") -> SamplingParams:
        """For the answer of this number. `processor` is the `custom_logit_processor` of the whole body."""
        return self.sampling_params(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            answer=answer,
            prefix="sampling_params.",
            processor=processor,
            seed=self.seed if self.seed is not None else self.sampling_seed,
        )


class GenerateBody(RequestModel):
    """Body of `/generate`: one prompt, or a batch where `text` or `input_ids` is a list of prompts."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    stream: bool = False
    rid: str | list[str] = ""
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] = []
    return_text_in_logprobs: bool = False
    priority: int = 0
    cache_salt: str = ""
    extra_key: str = ""
    params: dict[str, Any] = {}
    """What the request says to plugins that act on requests (admission gates), by provider name."""
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: Any = None
    lora_path: Any = None
    custom_logit_processor: str | dict[str, Any] | list[str | dict[str, Any]] = ""
    """As in `sampling_params`, for all of a batch; a processor's parameters are `sampling_params.custom_params`."""
    return_hidden_states: bool | list[bool] = False

    @property
    def batch(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for a request that is no batch. Raises InvalidRequest where there is none, or two kinds."""
        if (self.text is None) == (self.input_ids is None):
            what = "text or input_ids is needed" if self.text is None else "text and input_ids exclude each other"
            raise InvalidRequest(what, param="text")
        prompts: list[str | list[int]]
        if self.text is not None:
            prompts = list(self.text) if isinstance(self.text, list) else [self.text]
        else:
            ids: Any = self.input_ids
            prompts = ids if self.batch else [ids]
        name = "text" if self.text is not None else "input_ids"
        if not prompts or not all(prompts):
            raise InvalidRequest(f"{name} is empty", param=name)
        return prompts


class AbortBody(RequestModel):
    """Body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "lora_path",
    "return_hidden_states",
)
UNSUPPORTED_SAMPLING = ("json_schema", "regex", "ebnf", "structural_tag")


def refuse_unsupported(body: RequestModel, names: Sequence[str], prefix: str = "") -> None:
    """Raise InvalidRequest for a field that would change the answer and that nothing here understands yet."""
    for name in names:
        value = getattr(body, name)
        if any(value) if isinstance(value, list) else value:
            raise InvalidRequest(f"{prefix}{name} is not supported by this server", param=f"{prefix}{name}")


def engine_requests(body: GenerateBody) -> tuple[list[GenerateRequest], bool]:
    """What to submit, and whether the answer is a list: of prompts times `n`, prompt by prompt."""
    refuse_unsupported(body, UNSUPPORTED)
    prompts = body.prompts()
    count = len(prompts)
    samplings = [validate_part(one, SamplingBody, "sampling_params") for one in _each(body.sampling_params, count)]
    for sampling in samplings:
        refuse_unsupported(sampling, UNSUPPORTED_SAMPLING, "sampling_params.")
        if not 1 <= sampling.n <= MAX_REQUESTS:
            raise InvalidRequest(f"n must be from 1 to {MAX_REQUESTS}, got {sampling.n}", param="sampling_params.n")
    total = sum(sampling.n for sampling in samplings)
    if total > MAX_REQUESTS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_REQUESTS}, got {total}", param="text")
    logprobs = _logprobs(body, count)
    token_ids = _token_ids(body, count)
    rids = _rids(body, [sampling.n for sampling in samplings])
    salt = salt_of(body.cache_salt, body.extra_key)
    requests: list[GenerateRequest] = []
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        for answer in range(sampling.n):
            requests.append(
                GenerateRequest(
                    prompt=prompt,
                    sampling=sampling.params(answer, body.custom_logit_processor),
                    rid=rids[len(requests)],
                    stream=body.stream,
                    priority=body.priority,
                    cache_salt=salt,
                    logprobs=logprobs[i],
                    token_ids_logprob=token_ids[i],
                    params=body.params,
                )
            )
    return requests, body.batch or total > 1


def _each(value: Any, count: int, name: str = "sampling_params") -> list[Any]:
    """One value per prompt: a list as it is, anything else for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value


def _logprobs(body: GenerateBody, count: int) -> list[int | None]:
    if any(start >= 0 for start in _each(body.logprob_start_len, count, "logprob_start_len")):
        raise InvalidRequest("logprobs of the prompt are not supported yet", param="logprob_start_len")
    wanted = _each(body.return_logprob, count, "return_logprob")
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num")
    return [top if want else None for want, top in zip(wanted, tops, strict=True)]


def _token_ids(body: GenerateBody, count: int) -> list[tuple[int, ...]]:
    ids: Any = body.token_ids_logprob
    if ids and isinstance(ids[0], list):
        return [tuple(one) for one in _each(ids, count, "token_ids_logprob")]
    return [tuple(ids)] * count


def _rids(body: GenerateBody, answers: Sequence[int]) -> list[str]:
    """One id per answer; those of several answers are ``<rid>_<number>``, which aborting <rid> aborts together."""
    rids: list[str] = []
    if isinstance(body.rid, list):
        for rid, n in zip(_each(body.rid, len(answers), "rid"), answers, strict=True):
            rids += [rid] if n == 1 else [f"{rid}_{i}" for i in range(n)]
        return rids
    total = sum(answers)
    if total == 1 or not body.rid:
        return [body.rid] * total
    return [f"{body.rid}_{i}" for i in range(total)]
