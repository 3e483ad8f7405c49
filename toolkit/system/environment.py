"""The environment variables of helper processes that work on clients' data."""

from __future__ import annotations

import os

_KEPT = (
    *("PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "PEGBOARD_CACHE", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ"),
)


def helper_environment(**more: str) -> dict[str, str]:
    """Return what Python and its libraries need of this process's environment, and nothing else: it may hold keys and
    tokens. `more` is set besides.
    """
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | more
