"""Bodies of the native routes, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.toolkit.generation import MAX_REQUESTS
from pegboard.core.toolkit.http import RequestModel, validate_part


class SamplingBody(RequestModel):
    """`sampling_params` of a request."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] = {}
    """Parameters of logits processors that plugins add, by processor name."""
    n: int = 1
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    def params(self, answer: int = 0) -> SamplingParams:
        """For the answer of this number; with a seed, each of several answers gets one of its own."""
        seed = self.seed if self.seed is not None else self.sampling_seed
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            no_stop_trim=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            logit_bias=_bias(self.logit_bias),
            seed=None if seed is None else seed + answer,
            extra=self.custom_params,
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
    custom_logit_processor: Any = None
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
    "custom_logit_processor",
    "return_hidden_states",
)
UNSUPPORTED_SAMPLING = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag")


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
    salt = f"{body.cache_salt}\0{body.extra_key}" if body.extra_key else body.cache_salt
    requests: list[GenerateRequest] = []
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        for answer in range(sampling.n):
            requests.append(
                GenerateRequest(
                    prompt=prompt,
                    sampling=sampling.params(answer),
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


def _bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequest("logit_bias maps token ids to numbers", param="sampling_params.logit_bias") from None
