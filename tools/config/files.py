"""The files that a config names, looked at without starting anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.config.select import Selection
from pegboard.core.engine.reserving import Providers
from pegboard.core.engine.source import check_model
from pegboard.core.interfaces.errors import ConfigError, ModelError, Problem
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.tls import tls_context
from pegboard.toolkit.model.model_config import read_model_config
from pegboard.toolkit.system.culprits import Culprits

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.registry.hooks import Hooks

_PROVIDERS = "whether providers take the model"
_ON_DEVICE = "whether attention, sampler, runner, stages and ranks take the model"
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
    here, left, selection = True, None, Selection(resolved)
    try:
        here = check_model(resolved, selection)
        left = _choose(resolved, selection, hooks)
    except ConfigError as error:
        problems += error.problems
    except ModelError as error:
        text = str(error).removeprefix("model.path: ")
        problems.append(Problem("model.path", text, resolved.origins.get("model.path", "")))
    if problems:
        raise ConfigError([replace(one, origin=one.origin or resolved.origins.get(one.path, "")) for one in problems])
    return [*([] if here else ["the model, which is to be fetched"]), *_NOT_CHECKED, *([left] if left else [])]


def _choose(resolved: ResolvedConfig, selection: Selection, hooks: Hooks) -> str | None:
    """Choose for a model that is a directory what a start chooses before it reads weights. Return what could not be
    asked; None: all was. Raises as a start does.
    """
    import torch

    from pegboard.core.engine.build import choose, choose_family
    from pegboard.core.engine.followers import followers_of
    from pegboard.core.engine.stages import StageBuilder

    directory, said = Path(resolved.engine.model.path).expanduser(), resolved.engine.model.device
    if not directory.is_dir():
        return _PROVIDERS
    if said.startswith("cuda") or (said == "auto" and torch.cuda.is_available()):
        # Attention and samplers take memory of a GPU, where a server may be running; and it may not be here.
        hooks.call.configure(config=resolved.engine, origins=resolved.origins)
        length, described = resolved.engine.model.context_length, read_model_config(directory)
        model = ModelContext(directory, described, torch.float32, torch.device("cuda"), context_length=length)
        choose_family(selection, hooks, model, Providers(selection, Culprits()))
        return _ON_DEVICE
    chosen, _ = choose(resolved, hooks)
    followers = followers_of(chosen, hooks, StageBuilder(chosen, hooks, Path()), Path())
    if followers is not None:
        followers.close()
    return None
