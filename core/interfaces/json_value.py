"""The types of JSON: what `json.loads` may return, and what can be written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""Any JSON value. Ask with `isinstance(value, dict)`, `list` and so on before using it."""

JsonObject: TypeAlias = Mapping[str, JsonValue]
"""A JSON object that is only read."""
