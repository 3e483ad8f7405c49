"""Finds the plugin that raised an exception, and the place in its code, for errors that name it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Protocol

from pegboard.core.interfaces.errors import ConfigError, ModelError, OutOfMemory, PluginError

_OURS = __name__.partition(".")[0]

DELIBERATE = (ConfigError, ModelError, OutOfMemory, PluginError)
"""What a plugin raises on purpose, with a message for the operator."""


class Owner(Protocol):
    """What can name the plugin that it is part of."""

    def error(self, doing: str, error: BaseException) -> PluginError: ...


@contextlib.contextmanager
def told(owner: Owner, doing: str) -> Iterator[None]:
    """Around a call into a plugin. What it raises becomes a PluginError that names the plugin and the place, with the
    exception as its cause: `sys.exit` too, and the panics of native libraries. What is meant for the operator passes.
    """
    try:
        yield
    except (*DELIBERATE, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise owner.error(doing, error) from error


def text_of(error: BaseException) -> str:
    """Return what the exception says. Its `__str__` is a plugin's code too, and what that raises must not get
    further.
    """
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be told: {type(failure).__name__})"


def in_words(error: BaseException) -> str:
    """``ValueError: what is wrong``."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def describe(error: BaseException, module: str) -> str:
    """``ValueError: what is wrong (.../file.py:12)``, the place being in the package of `module`."""
    text = in_words(error)
    place = place_of(error, module)
    return f"{text} ({place})" if place else text


def place_of(error: BaseException, module: str) -> str:
    """``file:line`` of the deepest call in the package of `module`; "" where the traceback does not touch it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    package = _package(module)
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", ""))
        if name == package or name.startswith(f"{package}."):
            found = f"{frame.f_code.co_filename}:{line}"
    return found


def _package(module: str) -> str:
    """Return a distribution's outermost package; of Pegboard's own, which has many plugins, the folder that it is
    in.
    """
    top, _, _ = module.partition(".")
    return module.rpartition(".")[0] if top == _OURS else top
