"""Settings as they may be shown: no secret leaves through an information route."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"(^|_)(key|secret|password|token|credential)s?$")


def redact(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the values of whatever is called a key, a secret, a token or a password."""
    return {name: _redacted(name, value) for name, value in settings.items()}


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return [_redacted(name, one) for one in value]
    if isinstance(value, str) and value and _SECRET.search(name.lower()):
        return "***"
    return value
