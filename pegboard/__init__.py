"""Pegboard serves language models, and every feature of it is a plugin.

The names below are the public face. Each is imported when it is first used, so that ``import pegboard`` loads neither
torch nor transformers::

    import pegboard

    with pegboard.Engine(pegboard.compose(["examples/quickstart.yaml"])) as engine:
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pegboard.core import __version__

if TYPE_CHECKING:
    from pegboard.core.config.compose import compose
    from pegboard.core.engine.engine import Engine
    from pegboard.core.interfaces.sampling import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__", "compose"]

_HOMES = {
    "Engine": "pegboard.core.engine.engine",
    "SamplingParams": "pegboard.core.interfaces.sampling",
    "compose": "pegboard.core.config.compose",
}


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives. Raise AttributeError for any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
