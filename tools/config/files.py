"""The files that a config names, looked at without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.config.select import Selection
from pegboard.core.engine.reserving import Providers, services
from pegboard.core.engine.source import check_model
from pegboard.core.interfaces.errors import ConfigError, ModelError, Problem
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.tls import tls_context
from pegboard.toolkit.model.model_config import read_model_config
from pegboard.toolkit.system.culprits import Culprits

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.registry.hooks import Hooks

_NOT_CHECKED = ("the device and its memory", "the weights", "the port", "what plugins open, such as storages")


def check_files(resolved: ResolvedConfig, hooks: Hooks) -> list[str]:
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
    here, selection = True, Selection(resolved)
    try:
        here = check_model(resolved, selection)
        _call_model_services(resolved, selection, hooks)
    except ConfigError as error:
        problems += error.problems
    except ModelError as error:
        text = str(error).removeprefix("model.path: ")
        problems.append(Problem("model.path", text, resolved.origins.get("model.path", "")))
    if problems:
        raise ConfigError(problems)
    return [*([] if here else ["the model, which is to be fetched"]), *_NOT_CHECKED]


def _call_model_services(resolved: ResolvedConfig, selection: Selection, hooks: Hooks) -> None:
    """Let plugins look at a model that is a directory, as a start does: they refuse weights that they cannot read."""
    import torch

    from pegboard.core.interfaces.model_family import ModelContext

    directory = Path(resolved.engine.model.path).expanduser()
    if directory.is_dir():
        device = torch.device("cpu" if (said := resolved.engine.model.device) == "auto" else said)
        model = ModelContext(directory, read_model_config(directory), torch.float32, device)
        services(hooks, "model_services", model=model, chooser=Providers(selection, Culprits()))
