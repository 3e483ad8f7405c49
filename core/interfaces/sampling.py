"""Sampling parameters, as a user states them and as a batch carries them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pegboard.core.interfaces.conversion import Converting
from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_PATTERNS = 16
MAX_TOP_K = 2**31 - 1
_SMALLEST = 2.0**-126
"""Of the normal float32 numbers: anything smaller may be zero once it is in a tensor."""

SAMPLING_ROW = (
    ("temperature", "float32"),
    ("top_p", "float32"),
    ("min_p", "float32"),
    ("top_k", "int64"),
    ("seed", "int64"),
)
"""The numbers of a request that a sampler reads, as the fields of one numpy row. The core copies rows as wholes, so a
new number is declared in this file alone: here, in `SamplingParams` with `row`, and in `SamplingBatch` with `of`.
"""


BY_STAGES = msgspec.Meta(extra={"served_by": "stages"})
"""Marks a field of a request that the core leaves to stages, and refuses where none serves it (`stage_fields`)."""


def stage_fields(struct: type[msgspec.Struct]) -> dict[str, object]:
    """Return the fields of a struct that are marked BY_STAGES, with the values that ask for nothing: their defaults."""
    fields = msgspec.structs.fields(struct)
    return {one.name: one.default for one in fields if BY_STAGES in getattr(one.type, "__metadata__", ())}


GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of"]


class Grammar(msgspec.Struct, frozen=True):
    """What an output must look like. Equal ones are compiled once.

    `source` is the text of a JSON schema, a regular expression, EBNF whose start rule is `root`, or JSON: of a
    structural tag (`StructuralTag` of the toolkit), or with `any_of` ``[{"kind": str, "source": str}, ...]``, of which
    one has to fit; "" for `json_object`, which is any JSON object.
    """

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be: from `low` (above it, if `above`) up to `high`."""

    low: float
    high: float
    above: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise InvalidRequest, naming the field, for a value that is outside or not finite."""
        low = self.low + _SMALLEST if self.above else self.low
        if not (math.isfinite(value) and low <= value <= self.high):
            bound = "above" if self.above else "at least"
            raise InvalidRequest(
                f"{name} must be {bound} {self.low:g} and at most {self.high:g}, got {value}", param=name
            )


BOUNDS = {
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, above=True),
    "min_p": Bounds(0.0, 1.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "repetition_penalty": Bounds(0.0, 2.0, above=True),
}
"""The parameters that are plain numbers."""


SAMPLING_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_new_tokens",
)
"""The parameters for which a model may have defaults of its own (`ModelInfo.sampling_defaults`)."""


class SamplingParams(msgspec.Struct, metaclass=Converting, frozen=True, kw_only=True, omit_defaults=True):
    """One request's sampling parameters. The names are the field's.

    `max_new_tokens` None means: until the context is full. `temperature` 0 is greedy. `top_k` -1 (or 0) is off.
    `stop` strings and `stop_token_ids` end the output; the matched text is trimmed unless `no_stop_trim`.
    None of them counts before `min_new_tokens`; a stop string that is complete by then is text like any other.
    `stop_regex` expressions end it like stop strings, at the first character at which one of them has matched; what
    was matched last is trimmed from the leftmost place where a match that ends there begins.
    `grammar` is what the output must look like; None is free text.
    `seed` decides what is drawn: equal logits give equal tokens, in any batch. `logit_bias` maps token id to an addend.
    `extra` carries parameters of logits processors and samplers that plugins add, a dict each, by provider name.
    `unset` names parameters that the caller has left open: where the model has a default, the engine fills it in.

    The constructor converts what people pass: one text for `stop`, lists, texts of digits as keys of `logit_bias`,
    numbers of numpy. It raises InvalidRequest, which names the field, for what cannot be converted.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: Annotated[tuple[str, ...], BY_STAGES] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    grammar: Annotated[Grammar | None, BY_STAGES] = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, object] | None = None) -> SamplingParams:
        """Return parameters of a mapping, by name; those that it lacks are left to the model's defaults. Raises
        InvalidRequest for an unknown name, and for a value of the wrong type.
        """
        values = values or {}
        if unknown := [name for name in values if name not in cls.__struct_fields__]:
            known = ", ".join(cls.__struct_fields__)
            raise InvalidRequest(f"there is no sampling parameter {unknown[0]!r}; there are: {known}", param=unknown[0])
        make: Callable[..., SamplingParams] = cls
        return make(**{"unset": [name for name in SAMPLING_DEFAULTS if name not in values], **values})

    def filled(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Return the parameters with the model's defaults in what is unset."""
        if not self.unset:
            return self
        return msgspec.structs.replace(self, **{n: defaults[n] for n in self.unset if n in defaults}, unset=())

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def row(self, seed: int, vocab_size: int) -> tuple[float, float, float, int, int]:
        """Return the numbers of SAMPLING_ROW; `top_k` is the vocabulary's size where it is off."""
        top_k = self.top_k if 0 < self.top_k < vocab_size else vocab_size
        return self.temperature, self.top_p, self.min_p, top_k, seed

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest, naming the field, for a value that no sampler can honour."""
        self.validate_numbers()
        self.validate_collections(vocab_size)

    def validate_numbers(self) -> None:
        """`validate`, of what is a single number."""
        for name, bounds in BOUNDS.items():
            bounds.check(name, getattr(self, name))
        if not -1 <= self.top_k <= MAX_TOP_K:
            raise InvalidRequest(f"top_k must be -1 (off) or from 0 to {MAX_TOP_K}, got {self.top_k}", param="top_k")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise InvalidRequest(
                f"max_new_tokens must be at least 0, got {self.max_new_tokens}", param="max_new_tokens"
            )
        if self.min_new_tokens < 0:
            raise InvalidRequest(
                f"min_new_tokens must be at least 0, got {self.min_new_tokens}", param="min_new_tokens"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}",
                param="min_new_tokens",
                fields=("max_new_tokens",),
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest("seed must fit in 64 bits", param="seed")

    def validate_collections(self, vocab_size: int | None = None) -> None:
        """`validate`, of the rest, which answers to one prompt share."""
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_LENGTH} characters", param="stop")
        if len(self.stop_regex) > MAX_STOP_PATTERNS:
            raise InvalidRequest(
                f"at most {MAX_STOP_PATTERNS} stop expressions, got {len(self.stop_regex)}", param="stop_regex"
            )
        for text in self.stop_regex:
            if not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"a stop expression has 1 to {MAX_STOP_LENGTH} characters", param="stop_regex")
        self._validate_ids(vocab_size)

    def _validate_ids(self, vocab_size: int | None) -> None:
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if token < 0 or (vocab_size is not None and token >= vocab_size):
                    raise InvalidRequest(f"{name}: {token} is not a token id of this model", param=name)
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias: the bias of token {token} must be from -100 to 100, got {bias}", param="logit_bias"
                )


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What a logits processor or a sampler may know of one sampled row: plain values, no request object.

    `prompt_ids` int64 [prompt] and `output_ids` int64 [known so far] are views; they may be read, not kept. With the
    overlap loop the newest `pending` tokens are not known to the host yet, unless a processor of the request reads
    them (`LogitsProcessor.reads_output`). `memo` stays with the request to its end, for processors to keep things in.

    `ahead_ids` int64 [tokens ahead] follow `output_ids`: a stage has proposed them, and the token that is sampled here
    counts only if the model agrees with all of them. A request may have several rows in a step then, one per node of
    its tree. They are to be treated as output of this row, and nothing of them may be remembered in `memo`. Requests
    that want a processor without the capability `tokens_ahead` never have any.
    """

    params: SamplingParams
    prompt_ids: NDArray[np.int64]
    output_ids: NDArray[np.int64]
    pending: int = 0
    memo: dict[object, Any] = field(default_factory=dict)
    ahead_ids: NDArray[np.int64] | tuple[()] = ()

    @property
    def generated(self) -> int:
        """Tokens generated so far, those included that are not known yet, and those ahead."""
        return len(self.output_ids) + len(self.ahead_ids) + self.pending


@dataclass(slots=True)
class LogprobRequest:
    """Which logprobs one sampled row wants: `top` largest ones, and those of `token_ids`."""

    top: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of the sampled rows of one batch, in the order of the logits' rows.

    Tensors are on the model's device: `temperatures`, `top_ps`, `min_ps` float32 [n]; `top_ks` int64 [n] (vocab size
    where off); `seeds` int64 [n] and `steps` int64 [n] (tokens generated so far) decide what is drawn (see `Sampler`);
    a row without a seed has one drawn for it at intake. `all_greedy` and the `need_*` flags let a sampler skip work.
    `rows` feeds the logits processors and the sampler, and is empty when no request of the batch wants one of them.
    `mask` int32 [m, ceil(vocab / 32)] has a bit for each token that the rows `mask_rows` int64 [m] may get, after all
    processors (bit i%32 of word i//32 for token i); None where every row may get any. `logprob_ids` int64 are the token
    ids of all rows' `logprobs`, row after row; None where there are none, or where they are not on the device yet.
    """

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor
    all_greedy: bool
    need_top_p: bool = False
    need_top_k: bool = False
    need_min_p: bool = False
    logprobs: tuple[LogprobRequest | None, ...] = ()
    rows: Sequence[SamplingRow] = ()
    mask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None
    logprob_ids: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: NDArray[np.void],
        steps: torch.Tensor,
        vocab_size: int,
        tensor: Callable[[NDArray[Any]], torch.Tensor],
    ) -> SamplingBatch:
        """Build a batch from `rows` (SAMPLING_ROW) [n] and `steps` int64 [n]; `tensor` puts an array on the device."""
        temperature, top_p, min_p, top_k = (rows[name].copy() for name in ("temperature", "top_p", "min_p", "top_k"))
        return cls(
            temperatures=tensor(temperature),
            top_ps=tensor(top_p),
            top_ks=tensor(top_k),
            min_ps=tensor(min_p),
            seeds=tensor(rows["seed"].copy()),
            steps=steps,
            all_greedy=bool(((temperature == 0.0) | (top_k == 1)).all()),
            need_top_p=bool((top_p < 1.0).any()),
            need_top_k=bool((top_k < vocab_size).any()),
            need_min_p=bool((min_p > 0.0).any()),
        )

    @property
    def want_logprobs(self) -> bool:
        return any(request is not None for request in self.logprobs)

    def __len__(self) -> int:
        return int(self.temperatures.shape[0])
