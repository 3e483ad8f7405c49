"""What starts followers: processes that compute each batch along with the scheduler's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pegboard.core.engine.reserving import answers
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.followers import Followers, FollowersContext

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.engine.choose import Chosen
    from pegboard.core.engine.stages import StageBuilder
    from pegboard.core.registry.hooks import Hooks

MODULE = "pegboard.core.server.follower_process"


def start_followers(chosen: Chosen, hooks: Hooks, parts: StageBuilder, scratch: Path) -> Followers | None:
    """Return the followers that a plugin starts, if one does. Raises PluginError where several do, or answers are
    other things.
    """
    resolved = chosen.resolved

    def order(entry: str, about: str) -> bytes:
        orders = {"config": resolved.to_json(keys=False), "scratch": str(scratch), "entry": entry, "about": about}
        return json.dumps(orders).encode() + b"\n"

    offers = {
        name: [(record.name, resolved.provides(record)) for record in records]
        for name, records in resolved.candidates.items()
    }
    ctx = FollowersContext(chosen.providers, parts.points.stages, parts.parts, parts.lacking, offers, order, MODULE)
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
        raise PluginError(f"one plugin may start followers, not {' and '.join(plugin for plugin, _ in found)}")
    return found[0][1] if found else None
