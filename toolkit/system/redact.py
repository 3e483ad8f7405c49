"""Settings without secrets, for routes that show them."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "***"
_SECRET = re.compile(r"(^|_)(key|secret|password|token|credential)s?$")


def is_secret(path: str) -> bool:
    """Return whether the setting at a dotted path is called a key, a secret, a token or a password. `tokens` are those
    of language models, which are counted.
    """
    name = path.rpartition(".")[2].partition("[")[0].lower()
    return _SECRET.search(name) is not None and not name.endswith("tokens")


def redact(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings without the values of whatever is called a key, a secret, a token or a password."""
    return {name: _redacted(name, value) for name, value in settings.items()}


def _redacted(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return [_redacted(name, one) for one in value]
    if isinstance(value, str) and value and _SECRET.search(name.lower()):
        return HIDDEN
    return value
