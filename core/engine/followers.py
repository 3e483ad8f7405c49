"""What brings followers: processes that compute each batch along with the scheduler's."""

from __future__ import annotations

import json
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core import __version__
from pegboard.core.engine.reserving import answers
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.followers import Followers, FollowersContext
from pegboard.toolkit.model.weights_digest import weights_digest

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.engine.choose import Chosen
    from pegboard.core.engine.stages import StageBuilder
    from pegboard.core.registry.hooks import Hooks

MODULE = "pegboard.core.server.follower_process"


def followers_of(chosen: Chosen, hooks: Hooks, parts: StageBuilder, scratch: Path) -> Followers | None:
    """Return the followers that a plugin brings, if one does, before they are started. Raises PluginError where several
    do, or answers are other things.
    """
    resolved = chosen.resolved

    def order(entry: str, about: str) -> bytes:
        orders = {"config": resolved.to_json(keys=False), "scratch": str(scratch), "entry": entry, "about": about}
        return json.dumps(orders).encode() + b"\n"

    offers = {
        name: [(record.name, resolved.provides(record)) for record in records]
        for name, records in resolved.candidates.items()
    }
    ctx = FollowersContext(
        chosen.providers, parts.points.stages, parts.parts, parts.lacking, offers, order, MODULE,
        partial(facts, chosen), resolved.engine.scheduler.watchdog_timeout,
    )  # fmt: skip
    found: list[tuple[str, Followers]] = []
    for plugin, origin, made in answers(hooks, "followers", lambda made: made, ctx=ctx):
        if made is None:
            continue
        if not isinstance(made, Followers):
            raise PluginError(f"followers of plugin {plugin!r} ({origin}): {made!r} is not a Followers")
        found.append((plugin, made))
    if len(found) > 1:
        for _, made in found:
            made.close()
        raise PluginError(f"one plugin may bring followers, not {' and '.join(plugin for plugin, _ in found)}")
    return found[0][1] if found else None


def facts(chosen: Chosen) -> dict[str, str]:
    """Return what has to be the same where a model is computed together, by what it is called. The config is not among
    it, since it is sent, nor are plugins, which it is composed with.
    """
    described = json.dumps(chosen.model.hf_config, sort_keys=True, default=str)
    choices = chosen.selection.choices.items()
    return {
        "versions": f"Pegboard {__version__}, PyTorch {torch.__version__}, numpy {np.__version__}",
        "config.json": sha256(described.encode()).hexdigest(),
        "weights": weights_digest(chosen.model.directory).hex(),
        "providers": ", ".join(f"{contract} {one.name}" for contract, found in choices for one in found),
    }
