"""What `use: auto` takes, without a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.core.registry.records import ProviderRecord


def best(candidates: Sequence[ProviderRecord], context: Any) -> type[Any] | None:
    """The class of the first candidate without an objection to `context`, with default options."""
    for record in candidates:
        cls: type[Any] = record.load()
        if cls.supports(record.options_model()(), context) is None:
            return cls
    return None
