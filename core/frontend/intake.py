"""Intake: what a request must satisfy before the scheduler sees it, and text to tokens. Free of I/O."""

from __future__ import annotations

import sys
import uuid
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.frontend.features import Features
from pegboard.core.interfaces.client import AnnotatedPrompt, EmbedRequest, GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.text.encoding import check_length, overflow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.client import ModelInfo
    from pegboard.core.interfaces.tokenizer import Tokenizer

Prompt = str | list[int]

MAX_RID_LENGTH = 256
MAX_SALT_LENGTH = 1024
MAX_NAME_LENGTH = 4096
MAX_LOGPROBS = 128
MAX_TOKEN_IDS = 4096
"""Most entries of stop_token_ids, logit_bias and token_ids_logprob each."""
MAX_EXTRA_BYTES = 64 * 1024
_PARAMS = ("logits_processor.", "sampler.")
"""Features that are named after what takes parameters of a request."""


class Intake:
    """Turns what an API plugin states into what the scheduler takes, or refuses it.

    Knows the model and its tokenizer, keeps nothing between requests, and may be used from several threads.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, features: Features | None = None) -> None:
        self._info = info
        self.features = features or Features()
        self._tokenizer = tokenizer
        pool = info.max_total_tokens
        self._limit = min(info.max_context_len, pool) if pool > 0 else info.max_context_len

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt in tokens that can be answered: one token of the context is left for that. A request for
        no token (of a prompt's logprobs or embedding) may fill the context.
        """
        return self._limit - 1

    def check_text(self, prompt: Prompt) -> None:
        """Refuse a text that is empty, or certainly too long, before it is tokenised. Raises InvalidRequest."""
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if isinstance(prompt, str):
            check_length(prompt, self._limit)

    def pack(self, prompt: Prompt, ids: Sequence[int] | None = None, *, add_special_tokens: bool = True) -> bytes:
        """Return a prompt as it travels, for all requests that have it: int32 little-endian. `ids` are those of a text,
        where it has been tokenised. Raises InvalidRequest for a prompt that cannot be served.
        """
        self.check_text(prompt)
        if not isinstance(prompt, str):
            found: Sequence[int] = prompt
        elif ids is not None:
            found = ids
        else:
            found = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        self._check_prompt(found)
        return pack_ids(found)

    def pack_expanded(self, ids: NDArray[np.int64], note: str) -> bytes:
        """`pack` of a prompt with its items in it, of which `note` says how much they take."""
        if len(ids) > self._limit:
            raise self._too_long(len(ids), note)
        if len(ids) and not 0 <= (worst := int(ids.min()) if ids.min() < 0 else int(ids.max())) < self._info.vocab_size:
            raise self._unknown_id("prompt", worst)
        return ids.astype("<i4").tobytes()

    def check_size(self, requests: Sequence[TokenizedRequest]) -> None:
        """Raise InvalidRequest for requests of one client that the engine could not take together at any time."""
        tokens = sum(len(one.prompt) for one in requests) // 4
        most = self._info.most_requests
        if most is not None and len(requests) > most:
            raise InvalidRequest(
                f"{len(requests)} answers at once, where at most {most} may run and wait; ask for fewer "
                "(scheduler.max_running_requests and max_queued_requests)",
                code="batch_too_large",
            )
        most = self._info.most_tokens
        if most is not None and tokens > most:
            raise InvalidRequest(
                f"prompts of {tokens} tokens at once, one for each answer, where at most {most} may be in memory and "
                "wait; send fewer (memory.max_total_tokens and scheduler.max_queued_tokens)",
                code="batch_too_large",
            )

    def prepare_all(self, requests: Sequence[GenerateRequest], packed: Sequence[bytes]) -> list[TokenizedRequest]:
        """`prepare` of requests that belong together: parameters that several of them share are checked once."""
        checked: set[tuple[int, ...]] = set()
        found = []
        for request, data in zip(requests, packed, strict=True):
            sampling = request.sampling
            shared = (sampling.stop, *self.features.spelt(sampling), sampling.stop_token_ids, sampling.logit_bias)
            key = tuple(map(id, (*shared, sampling.extra, request.params)))
            found.append(self.prepare(request, data, checked=key in checked))
            checked.add(key)
        return found

    def prepare(
        self,
        request: GenerateRequest,
        packed: bytes | None = None,
        *,
        checked: bool = False,
        asked: EmbedRequest | None = None,
    ) -> TokenizedRequest:
        """Return the request, tokenised and with every default filled in. `packed` is its prompt, where `pack` has made
        it; `checked` says that lists and mappings among its parameters have been checked. `asked` is what stages see.

        `max_new_tokens` is always set afterwards, and clipped to what the context leaves after the prompt. Raises
        InvalidRequest, naming the field, for what cannot be served.
        """
        _check_names(request)
        sampling = request.sampling.filled(self._info.sampling_defaults)
        sampling.validate_numbers()
        if not checked:
            self.check_collections(sampling)
            _check_plain("parameters for plugins", request.params, "params")
        self._check_logprobs(request)
        if packed is None:
            packed = self.pack(text_of(request.prompt), add_special_tokens=request.add_special_tokens)
        length = len(packed) // 4
        if length > self.max_prompt_len and sampling.max_new_tokens != 0:
            raise self._too_long(length)
        message = TokenizedRequest(
            rid=request.rid or uuid.uuid4().hex,
            prompt=packed,
            sampling=self._fit(sampling, length),
            stream=request.stream,
            priority=request.priority,
            namespace=_namespace(request.cache_salt),
            logprobs=request.logprobs,
            token_ids_logprob=request.token_ids_logprob,
            params=request.params,
            model=self._info.named(request.model),
        )
        self.features.prepare(asked or request, message, self._info)
        return message

    def prepare_embed(self, request: EmbedRequest, packed: bytes | None = None) -> TokenizedRequest:
        """As `prepare`, of a prompt whose embedding is wanted."""
        if request.dimensions is not None and request.dimensions < 1:
            raise InvalidRequest(f"dimensions must be at least 1, got {request.dimensions}", param="dimensions")
        as_generation = GenerateRequest(
            prompt=request.prompt,
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
            rid=request.rid,
            priority=request.priority,
            cache_salt=request.cache_salt,
            add_special_tokens=request.add_special_tokens,
            params=request.params,
            model=request.model,
        )
        return self.prepare(as_generation, packed, asked=request)

    def prepare_embeds(self, requests: Sequence[EmbedRequest], packed: Sequence[bytes]) -> list[TokenizedRequest]:
        """`prepare_embed` of requests that belong together."""
        return [self.prepare_embed(one, data) for one, data in zip(requests, packed, strict=True)]

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidRequest("the prompt is empty: the text has no tokens", param="prompt")
        if len(ids) > self._limit:
            raise self._too_long(len(ids))
        self._check_ids("prompt", ids)

    def _too_long(self, length: int, note: str = "") -> InvalidRequest:
        text = overflow(length, self.max_prompt_len, self._limit)
        if note:
            text += f"; {note}"
        return InvalidRequest(text, param="prompt", code="context_length_exceeded")

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        if not ids:
            return
        worst = low if (low := min(ids)) < 0 else max(ids)
        if not 0 <= worst < self._info.vocab_size:
            raise self._unknown_id(param, worst)

    def _unknown_id(self, param: str, worst: int) -> InvalidRequest:
        text = f"{param}: {worst} is not a token id of this model (0 to {self._info.vocab_size - 1})"
        return InvalidRequest(text, param=param)

    def check_collections(self, sampling: SamplingParams) -> None:
        """Raise InvalidRequest, naming the field, for lists and mappings that this model cannot honour. What
        stages match in texts is compiled on the way.
        """
        for name in ("stop_token_ids", "logit_bias"):
            if len(getattr(sampling, name)) > MAX_TOKEN_IDS:
                raise InvalidRequest(f"{name} may have at most {MAX_TOKEN_IDS} entries", param=name)
        for text in sampling.stop:
            _check_text("stop", text, sys.maxsize)
        sampling.validate_collections(self._info.vocab_size)
        self.features.compile_stops(sampling)
        self._check_custom(sampling.extra)

    def _check_custom(self, extra: dict[str, object]) -> None:
        """Processors and samplers are meant by the names of those that are configured, and never sent as code."""
        _check_plain("custom parameters", extra, "custom_params")
        for name, params in extra.items():
            known = [one.partition(".")[2] for one in self._info.features if one.startswith(_PARAMS)]
            if name not in known:
                raise InvalidRequest(
                    f"{name[:64]!r} is not a logits processor or sampler that takes parameters; this server's are: "
                    f"{', '.join(known) or 'none'}",
                    param="custom_logit_processor",
                )
            if not isinstance(params, dict):
                raise InvalidRequest(f"custom_params.{name} must be an object", param=f"custom_params.{name}")

    def _check_logprobs(self, request: GenerateRequest) -> None:
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be from 0 to {MAX_LOGPROBS}, got {request.logprobs}", param="logprobs")
        if len(request.token_ids_logprob) > MAX_TOKEN_IDS:
            raise InvalidRequest(
                f"token_ids_logprob may have at most {MAX_TOKEN_IDS} entries", param="token_ids_logprob"
            )
        self._check_ids("token_ids_logprob", request.token_ids_logprob)

    def _fit(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        room = self._limit - prompt_len
        wanted = sampling.max_new_tokens
        longest = room if wanted is None else min(wanted, room)
        return msgspec.structs.replace(
            sampling, max_new_tokens=longest, min_new_tokens=min(sampling.min_new_tokens, longest)
        )


def text_of(prompt: Prompt | AnnotatedPrompt) -> Prompt:
    """Return a prompt without items. Raises InvalidRequest where it has any."""
    if not isinstance(prompt, AnnotatedPrompt):
        return prompt
    if prompt.items:
        raise prompt.refusal()
    return prompt.base


def _check_names(request: GenerateRequest) -> None:
    """Raise InvalidRequest for what a request is called by, or its priority, out of bounds."""
    _check_text("rid", request.rid, MAX_RID_LENGTH)
    _check_text("cache_salt", request.cache_salt, MAX_SALT_LENGTH)
    _check_text("model", request.model, MAX_NAME_LENGTH)
    if not -(2**31) <= request.priority < 2**31:
        raise InvalidRequest("priority must fit in 32 bits", param="priority")


def _namespace(cache_salt: str) -> str:
    return f"salt:{cache_salt}" if cache_salt else ""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as they travel: int32, little-endian. Reads back with ``numpy.frombuffer(data, "<i4")``."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _check_plain(what: str, values: dict[str, object], param: str) -> None:
    """Refuse what cannot travel, or is large."""
    if not values:
        return
    try:
        size = len(msgspec.msgpack.encode(values))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{what} must be plain values: {error}", param=param) from error
    if size > MAX_EXTRA_BYTES:
        raise InvalidRequest(f"{what} take {size} bytes; the limit is {MAX_EXTRA_BYTES}", param=param)


def _check_text(param: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise InvalidRequest(f"{param} may have at most {longest} characters, got {len(text)}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds lone surrogates, which are not valid Unicode", param=param) from None
