"""Groups of commands that entry points add to.

A group reads the entry points of `OpenGroup.entry_points`. A name is the command's; with a dot it goes into a group of
commands, as `plugins.check` goes into `plugins` (`OpenGroup.inside`). It points to a function that is annotated for
typer, or to a `typer.Typer` with commands of its own. A command is imported when it is run, or when the help lists it.
One that cannot be imported says so there, and harms no other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, runtime_checkable

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as build

from pegboard.core.interfaces.errors import PluginError
from pegboard.toolkit.system.blame import describe

_BUILTIN = "pegboard"
_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@runtime_checkable
class UnknownOption(Protocol):
    """Click's NoSuchOption, which typer has under one name or another."""

    option_name: str
    possibilities: Sequence[str] | None
    message: str
    ctx: typer.Context | None


class OpenGroup(TyperGroup):
    """A group of commands that entry points add to. Its own commands come first and cannot be replaced."""

    entry_points: ClassVar[str]
    """The group of the entry points."""
    inside: ClassVar[str] = ""
    """What their names begin with, such as ``"plugins."``."""

    def explain(self, error: UnknownOption, words: Sequence[str]) -> None:
        """Add to the error of an unknown option, which is among `words`, what to write instead. Here nothing."""

    def list_commands(self, ctx: object) -> list[str]:
        """Return all names: the group's own commands in their order, then those of entry points by name."""
        own = [name for name in self.commands if name not in self._points]
        return own + sorted(self._points.keys() - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, imported now if it comes from an entry point; None if there is none."""
        if cmd_name not in self.commands and cmd_name in self._points:
            self.commands[cmd_name] = load(cmd_name, self._points[cmd_name])
        if cmd_name not in self.commands:
            # For "did you mean".
            for name in self._points:
                self.get_command(ctx, name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> object:
        """Run the command."""
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, UnknownOption):
                self.explain(error, words)
            raise

    @functools.cached_property
    def _points(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.entry_points):
            name = point.name.removeprefix(self.inside)
            if point.name.startswith(self.inside) and "." not in name and name not in self.commands:
                found.setdefault(name, []).append(point)
        return found


def load(name: str, points: Sequence[EntryPoint]) -> TyperCommand | TyperGroup:
    """Import the command `name`. Where that fails, return a command that raises PluginError with the reason.

    Of several distributions that bring a command of this name, Pegboard's own wins; without one, none is run.
    """
    builtin = [point for point in points if point.dist is not None and point.dist.name == _BUILTIN]
    if len(points) > 1 and not builtin:
        return _broken(name, f"it is brought by {' and by '.join(sorted(map(_origin, points)))}; uninstall all but one")
    point = (builtin or points)[0]
    try:
        return _command(name, point.load())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Also one that calls sys.exit: it ends itself and nothing else.
        reason = describe(error, point.value.partition(":")[0])
        return _broken(name, f"{reason}; update or uninstall {_origin(point)}")


def _command(name: str, found: object) -> TyperCommand | TyperGroup:
    holder = _holder()
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    elif callable(found):
        holder.command(name)(found)
    else:
        raise TypeError(f"a command must be a function or a typer.Typer, not {type(found).__name__}")
    return _only(holder, name)


def _broken(name: str, reason: str) -> TyperCommand | TyperGroup:
    def fail() -> None:
        raise PluginError(f"the command {name!r} cannot be loaded: {reason}")

    holder = _holder()
    holder.command(name, help=f"Cannot be loaded: {reason}", context_settings=_ANY_ARGUMENTS)(fail)
    return _only(holder, name)


def _holder() -> typer.Typer:
    """Return an application that stays a group with a single command, since it has a callback."""
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.callback()(_nothing)
    return holder


def _nothing() -> None:
    pass


def _only(holder: typer.Typer, name: str) -> TyperCommand | TyperGroup:
    group = build(holder)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    assert isinstance(command, (TyperCommand, TyperGroup))
    return command


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"
