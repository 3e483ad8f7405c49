"""Constraints on answers by the names that vLLM and SGLang have for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.grammars.gbnf import START, Choice, Literal, to_gbnf
from pegboard.toolkit.http.bodies import RequestModel

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import ModelInfo
    from pegboard.core.interfaces.sampling import GrammarKind

MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 * 1024
"""Most characters of all choices together, which become a grammar on the event loop."""
MAX_ALLOWED = 4096

_PROCESSORS = {"bad_words": "words", "allowed_token_ids": "ids"}
"""Fields that are lists, and the parameter that each is to the logits processor of its name."""

_WITHOUT_EFFECT = ("backend", "disable_fallback")
"""Of `structured_outputs`: how vLLM is to go about it."""


class AskedGrammar(NamedTuple):
    """A grammar of a body: what it is called there, what it is, and what it says."""

    name: str
    kind: GrammarKind
    value: Any


class ConstraintFields(RequestModel):
    """vLLM's fields of structured outputs, new and old, and of tokens; SGLang's `json_schema`."""

    structured_outputs: dict[str, Any] | None = None
    """One of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag`."""
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool = False
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    bad_words: list[str] = []
    """Words that the answer does not have."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may come."""
    include_stop_str_in_output: bool = False
    """The same as `no_stop_trim`."""
    return_token_ids: bool = False
    """Whether prompts and answers are given as token ids too."""

    def check_constraints(self, info: ModelInfo) -> None:
        """Raise InvalidRequest, naming the field, for tokens and words that this server cannot allow or forbid."""
        for name in _PROCESSORS:
            if getattr(self, name) and f"logits_processor.{name}" not in info.features:
                raise InvalidRequest(
                    f"{name}: this server does not have it; add {name} to logits_processors in its config",
                    param=name,
                    code="not_available",
                )
        ids = self.allowed_token_ids
        if ids is None:
            return
        if not 0 < len(ids) <= MAX_ALLOWED:
            raise InvalidRequest(
                f"allowed_token_ids must have from 1 to {MAX_ALLOWED} entries, got {len(ids)}",
                param="allowed_token_ids",
            )
        for token in ids:
            if not 0 <= token < info.vocab_size:
                raise InvalidRequest(
                    f"allowed_token_ids: {token} is not a token id of this model (0 to {info.vocab_size - 1})",
                    param="allowed_token_ids",
                )

    def processor_params(self, extra: Mapping[str, object]) -> dict[str, object]:
        """`extra`, what a request says to logits processors by itself, and what these fields say."""
        found = dict(extra)
        for name, parameter in _PROCESSORS.items():
            value = getattr(self, name)
            if value and name in found:
                raise InvalidRequest(f"{name} stands in custom_params too; leave one of them out", param=name)
            if value:
                found[name] = {parameter: value}
        return found

    @property
    def processor_names(self) -> dict[str, str]:
        """What the parameters of those processors are called here."""
        return {f"custom_params.{name}.{parameter}": name for name, parameter in _PROCESSORS.items()}

    @cached_property
    def constraints(self) -> tuple[AskedGrammar, ...]:
        """The grammars that these fields ask for. Raises InvalidRequest."""
        fields: dict[str, tuple[GrammarKind, object]] = {
            "json_schema": ("json_schema", self.json_schema),
            "guided_json": ("json_schema", self.guided_json),
            "guided_json_object": ("json_object", self.guided_json_object or None),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("ebnf", _choices(self.guided_choice, "guided_choice")),
            "guided_grammar": ("ebnf", self.guided_grammar),
        }
        found = [AskedGrammar(name, *asked) for name, asked in fields.items() if asked[1] is not None]
        return (*found, *(_structured(self.structured_outputs) if self.structured_outputs is not None else ()))


def _structured(form: Mapping[str, object]) -> list[AskedGrammar]:
    where = "structured_outputs"
    kinds: dict[str, GrammarKind] = {
        "json": "json_schema",
        "json_object": "json_object",
        "regex": "regex",
        "choice": "ebnf",
        "grammar": "ebnf",
        "structural_tag": "structural_tag",
    }
    for name, value in form.items():
        if value and name not in kinds and name not in _WITHOUT_EFFECT:
            raise InvalidRequest(
                f"{where}.{name[:64]} is not supported by this server", param=f"{where}.{name[:64]}", code="unsupported"
            )
    found = []
    for name, kind in kinds.items():
        value, called = form.get(name), f"{where}.{name}"
        if name == "json_object" and value not in (None, False, True):
            raise InvalidRequest(f"{called} must be true or false", param=called)
        if name == "choice":
            value = _choices(value, called)
        if value is not None and not (name == "json_object" and not value):
            found.append(AskedGrammar(called, kind, value))
    if not found:
        raise InvalidRequest(f"{where} must have one of {', '.join(kinds)}", param=where)
    return found


def _choices(texts: object, name: str) -> str | None:
    """Return a grammar of these texts and nothing else."""
    if texts is None:
        return None
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequest(f"{name} must be a list of texts, and none of them empty", param=name)
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"{name} may have at most {MAX_CHOICES} entries, got {len(texts)}", param=name)
    size = sum(map(len, texts))
    if size > MAX_CHOICE_CHARS:
        raise InvalidRequest(
            f"{name} may have at most {MAX_CHOICE_CHARS} characters in all entries together, got {size}", param=name
        )
    return to_gbnf({START: Choice(tuple(Literal(one) for one in dict.fromkeys(texts)))})
