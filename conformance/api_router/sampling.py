"""For the suite of ApiRouter: which fields of a body name sampling parameters, and what they are tried with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.core.interfaces.sampling import BOUNDS

NAMES = {name: name for name in BOUNDS} | {
    "max_new_tokens": "max_new_tokens max_tokens max_completion_tokens max_output_tokens num_predict n_predict",
    "min_new_tokens": "min_new_tokens min_tokens",
    "temperature": "temperature temp",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty repeat_penalty",
    "stop": "stop stop_sequences stop_strings",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "no_stop_trim",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "seed": "seed",
}
"""What bodies call the engine's parameters. Case and underscores do not matter: maxTokens is max_tokens."""

VALUES: dict[str, Any] = {name: one.low + (one.high - one.low) / 8 for name, one in BOUNDS.items()} | {
    "max_new_tokens": 11,
    "min_new_tokens": 3,
    "temperature": 0.25,
    "top_p": 0.75,
    "top_k": 7,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.375,
    "repetition_penalty": 1.25,
    "stop": "END7",
    "stop_token_ids": 9,
    "stop_regex": "x[yz]",
    "ignore_eos": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "seed": 1234,
}
"""A value of each that is not an API's default."""

_KNOWN = {name.replace("_", ""): parameter for parameter, names in NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Parameter:
    """A field of a body that names a sampling parameter, and a value for it that its schema allows."""

    path: tuple[str, ...]
    name: str
    value: Any

    def __str__(self) -> str:
        return ".".join(self.path)

    def put_into(self, body: Mapping[str, Any], others: list[Parameter]) -> dict[str, Any]:
        """Return the body with this value, and without other fields that say the same."""
        body = dict(body)
        for one in others:
            if one.name == self.name and one.path != self.path:
                body = _without(body, one.path)
        return _with(body, self.path, self.value)

    def left_out(self, body: Mapping[str, Any], others: list[Parameter]) -> dict[str, Any]:
        """Return the body without this parameter, whatever fields say it."""
        body = dict(body)
        for one in others:
            if one.name == self.name:
                body = _without(body, one.path)
        return body

    def has_arrived(self, found: Any) -> bool:
        """Return whether the engine's parameter is what the body says; it may have more stop strings."""
        if isinstance(found, tuple):
            wanted = self.value if isinstance(self.value, list) else [self.value]
            return all(one in found for one in wanted)
        return bool(found == self.value)


def parameters_of(schema: Mapping[str, Any], names: Mapping[str, str]) -> list[Parameter]:
    """Return the fields of a body's schema that name sampling parameters; `names` says more, or otherwise."""
    return list(_walk(schema, names, ()))


def _walk(schema: Mapping[str, Any], names: Mapping[str, str], path: tuple[str, ...]) -> Iterator[Parameter]:
    for name, one in schema.get("properties", {}).items():
        here = (*path, name)
        known = names.get(".".join(here), _KNOWN.get(re.sub("[_-]", "", name).lower(), ""))
        kinds = _kinds(one)
        if known and (value := _fitting(VALUES[known], kinds)) is not None:
            yield Parameter(here, known, value)
        for option in (one, *one.get("anyOf", ())):
            if len(path) < 2 and option.get("properties"):
                yield from _walk(option, names, here)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("type")
    own = set(found) if isinstance(found, list) else {found} if found else set()
    return own.union(*[_kinds(one) for key in ("anyOf", "oneOf") for one in schema.get(key, ())])


def _fitting(value: Any, kinds: set[str]) -> Any:
    kind = {bool: "boolean", int: "integer", float: "number", str: "string"}[type(value)]
    if kind in kinds or (kind == "integer" and "number" in kinds) or not kinds:
        return value
    return [value] if "array" in kinds else None


def _with(body: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    below = body.get(name)
    inner = below if isinstance(below, dict) else {}
    return {**body, name: _with(inner, tuple(rest), value) if rest else value}


def _without(body: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    if rest and isinstance(body.get(name), dict):
        return {**body, name: _without(body[name], tuple(rest))}
    return {key: value for key, value in body.items() if rest or key != name}
