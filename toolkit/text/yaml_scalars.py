"""YAML 1.2's scalars, and numbers that remember how they were written, for options that are texts."""

from __future__ import annotations

import re

import yaml


class WrittenInt(int):
    """An integer of a config. As a text it is what stands in the config: 007, not 7."""

    _text: str

    def __new__(cls, value: int, text: str) -> WrittenInt:
        """Return the number `value`, written `text`."""
        made = super().__new__(cls, value)
        made._text = text
        return made

    def __str__(self) -> str:
        return self._text


class WrittenFloat(float):
    """A number with a point or an exponent of a config. As a text it is what stands in the config: 1.10, not 1.1."""

    _text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Return the number that is written `text`."""
        made = super().__new__(cls, _FLOATS.get(text.lower().lstrip("+"), text))
        made._text = text
        return made

    def __str__(self) -> str:
        return self._text


_FLOATS = {".inf": "inf", "-.inf": "-inf", ".nan": "nan"}


def written_int(text: str) -> WrittenInt:
    """Return an integer of YAML 1.2: decimal whatever zeros stand in front, or with 0o or 0x."""
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return WrittenInt(int(text if base == 10 else text[2:], base), text)


class Loader(yaml.SafeLoader):
    """YAML with the core schema of YAML 1.2: `on`, `off`, `yes`, `no`, 12:30, 1_000 and what looks like a date are
    texts, and 0123 is decimal.
    """


_TAG = "tag:yaml.org,2002:"
# Others' mappings of first characters are shared between classes, so this one begins anew.
Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> WrittenInt:
    text = loader.construct_scalar(node)
    try:
        return written_int(text)
    except ValueError:
        raise yaml.MarkedYAMLError(problem=f"{text!r:.40} is not an integer", problem_mark=node.start_mark) from None


def _construct_float(loader: Loader, node: yaml.ScalarNode) -> WrittenFloat:
    text = loader.construct_scalar(node)
    try:
        return WrittenFloat(text)
    except ValueError:
        raise yaml.MarkedYAMLError(problem=f"{text!r:.40} is not a number", problem_mark=node.start_mark) from None


Loader.add_constructor(f"{_TAG}int", _construct_int)
Loader.add_constructor(f"{_TAG}float", _construct_float)
