"""Commands from entry points, ours and third parties' alike.

A distribution adds a command with an entry point of the group `pegboard.commands`; `toolkit.system.command_groups` says
how::

    [project.entry-points."pegboard.commands"]
    warm = "acme.commands:warm"
"""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.toolkit.system.command_groups import OpenGroup, UnknownOption

COMMAND_GROUP = "pegboard.commands"


class Commands(OpenGroup):
    """`pegboard`."""

    entry_points = COMMAND_GROUP

    def explain(self, error: UnknownOption, words: Sequence[str]) -> None:
        """Say what to write instead of an unknown flag of a command that takes a config (`--set`)."""
        parameters = [] if error.ctx is None else error.ctx.command.params
        if not any("--set" in parameter.opts for parameter in parameters):
            return
        from pegboard.core.config.shape import Shape
        from pegboard.core.config.suggest import known_option
        from pegboard.core.registry.registry import Registry

        # Of -tp the error names -t.
        flags = [word.partition("=")[0] for word in words if word.startswith(error.option_name)]
        shape = Shape.of(Registry.discover())
        hint = next(filter(None, (known_option(flag, shape, close=not error.possibilities) for flag in flags)), "")
        if hint:
            error.possibilities = None
        elif not error.possibilities:
            hint = "every key of the config can be set with --set KEY=VALUE"
        error.message = "; ".join(filter(None, [error.message, hint]))


class PluginsGroup(Commands):
    """`pegboard plugins`."""

    inside = "plugins."
