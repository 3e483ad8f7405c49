"""The files that a config names, looked at without starting anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.config.select import Selection
from pegboard.core.engine.source import check_model
from pegboard.core.interfaces.errors import ConfigError, ModelError, Problem
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.tls import tls_context

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig

_NOT_CHECKED = ("the device and its memory", "the weights", "the port", "what plugins open, such as storages")


def check_files(resolved: ResolvedConfig) -> list[str]:
    """Look at key files, certificates and the model, and return what is left for the start. Raises ConfigError with all
    that is wrong with them.
    """
    problems: list[Problem] = []
    server = resolved.engine.server
    for check in (lambda: Keys.of(server), lambda: tls_context(server.tls)):
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    here = True
    try:
        here = check_model(resolved, Selection(resolved))
    except ConfigError as error:
        problems += error.problems
    except ModelError as error:
        text = str(error).removeprefix("model.path: ")
        problems.append(Problem("model.path", text, resolved.origins.get("model.path", "")))
    if problems:
        raise ConfigError(problems)
    return [*([] if here else ["the model, which is to be fetched"]), *_NOT_CHECKED]
