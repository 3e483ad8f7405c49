"""Lazy names: ``"package.module:Name"``, imported only when the thing itself is needed."""

from __future__ import annotations

import importlib
import re
from typing import Any

_PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_lazy_name(text: str) -> bool:
    return _PATTERN.fullmatch(text) is not None


def import_name(text: str) -> Any:
    """Return the object that ``"package.module:Name"`` names.

    Raises ValueError for a malformed name, AttributeError where the module lacks it, and whatever the import raises.
    """
    if not is_lazy_name(text):
        raise ValueError(f"{text!r} is not a lazy name; it must read 'package.module:Name'")
    module, _, attributes = text.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    return value
