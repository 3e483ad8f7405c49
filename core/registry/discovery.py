"""Finding plugins: entry points are read, disabled ones never imported, broken ones kept with their error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from pegboard.core.interfaces.errors import ConfigError, PluginError, Problem
from pegboard.core.interfaces.plugin import ENTRY_POINT_GROUP, Plugin
from pegboard.core.registry.records import Origin, check_plugin
from pegboard.toolkit.system.blame import describe, place_of, told
from pegboard.toolkit.system.lazy_names import import_name
from pegboard.toolkit.text.near_names import did_you_mean

ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    plugin: Plugin
    origin: Origin

    def __str__(self) -> str:
        return f"plugin {self.plugin.name!r} ({self.origin})"

    def active(self, asked: Collection[str]) -> bool:
        """Return whether its hooks, fields and contracts count, where the config asks for the plugins `asked`."""
        return self.plugin.name in asked or (self.origin.builtin and self.plugin.hooks_on)

    def wrong(self, text: str, place: str = "") -> PluginError:
        """Return an error that names the plugin, and says how to go on without it."""
        name = self.plugin.name
        return PluginError(
            f"{text}; add {name!r} to plugins.disable to go on without it",
            plugin=name,
            distribution=self.origin.distribution,
            version=self.origin.version,
            path="plugins.disable",
            place=place,
        )

    def part(self, name: str, what: str) -> PluginPart:
        """Return a part of it that a lazy name leads to, for `blame.told`; `what` says which, such as "fields"."""
        return PluginPart(self, name, what)


@dataclass(frozen=True, slots=True)
class PluginPart:
    """A module or class of a plugin that is not a provider's, for errors: whose it is, and how to go on without it."""

    loaded: LoadedPlugin
    name: str
    what: str

    def error(self, doing: str, error: BaseException) -> PluginError:
        module = self.name.partition(":")[0]
        return self.wrong(f"{doing}: {describe(error, module)}", place_of(error, module))

    def model(self, base: type[ModelT]) -> type[ModelT]:
        """Import the pydantic model that it is. Raises PluginError where that fails, and where it is none of `base`."""
        with told(self, "cannot be imported"):
            model = import_name(self.name)
        if not (isinstance(model, type) and issubclass(model, base)):
            raise self.wrong(f"is not a subclass of {base.__module__}:{base.__qualname__}")
        return model

    def wrong(self, text: str, place: str = "") -> PluginError:
        return self.loaded.wrong(f"{self.what} {self.name} of {self.loaded} {text}", place)


@dataclass(frozen=True, slots=True)
class DisabledPlugin:
    """A plugin that the config leaves out. Its record is not imported, but for a message, and if it is built-in."""

    name: str
    origin: Origin
    load: Callable[[], object]

    def record(self) -> Plugin | None:
        """Return the record of a built-in plugin; None where it cannot be read, and of any other plugin."""
        try:
            found = self.load() if self.origin.builtin else None
        except Exception:
            return None
        return found if isinstance(found, Plugin) else None


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin whose record cannot be read: what went wrong, and what to do about it."""

    name: str
    origin: Origin
    error: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} ({self.origin}) is broken: {self.error}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that discovery saw. `conflicts` tell what was left out, and why."""

    loaded: tuple[LoadedPlugin, ...]
    broken: tuple[BrokenPlugin, ...]
    disabled: tuple[DisabledPlugin, ...]
    conflicts: tuple[str, ...]


def discover(disable: Collection[str] = (), *, points: Iterable[EntryPoint] | None = None) -> Found:
    """Read the entry points of all installed distributions; built-ins first, then by name.

    Raises ConfigError for a name in `disable` that no distribution brings; a mapping says which key of the config has
    each name. Tests pass `points` instead.
    """
    origin_of = cache(_origin)
    points = _installed(tuple(map(_folder, sys.path))) if points is None else points
    found = [(point, origin_of(point.dist)) for point in points]
    found.sort(key=lambda pair: (not pair[1].builtin, pair[0].name, pair[1].distribution))
    check_disabled(disable, {point.name for point, _ in found})
    enabled = [(point, origin) for point, origin in found if point.name not in disable]
    conflicts, clashing = _name_conflicts(enabled)
    loaded: list[LoadedPlugin] = []
    broken: list[BrokenPlugin] = []
    for point, origin in enabled:
        if point.name in clashing and not origin.builtin:
            continue
        try:
            loaded.append(LoadedPlugin(check_plugin(point.load(), point.name), origin))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Also one that calls sys.exit: it ends itself and nothing else.
            broken.append(_broken(point, origin, error))
    disabled = tuple(DisabledPlugin(point.name, origin, point.load) for point, origin in found if point.name in disable)
    return Found(tuple(loaded), tuple(broken), disabled, conflicts)


@lru_cache(maxsize=1)
def _installed(folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of plugins in the folders of sys.path. Kept until another folder is there, or one has
    changed, as each does where a distribution is installed or removed.
    """
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _folder(path: str) -> tuple[str, int]:
    """Return a folder, and when names in it changed last, in nanoseconds; 0 where it is not there."""
    folder = Path(path).absolute()
    try:
        return str(folder), folder.stat().st_mtime_ns
    except OSError:
        return str(folder), 0


def _origin(dist: Distribution | None) -> Origin:
    return Origin(dist.name.lower().replace("_", "-"), dist.version) if dist else Origin("unknown distribution", "?")


def check_disabled(disable: Collection[str], known: Collection[str]) -> None:
    problems = []
    for name in (one for one in disable if one not in known):
        hint = did_you_mean(name, known)
        message = f"no plugin {name!r} is installed; " + (f"{hint} " if hint else "")
        path = disable[name] if isinstance(disable, Mapping) else "plugins.disable"
        problems.append(Problem(path, f"{message}installed: {', '.join(sorted(known)) or 'none'}"))
    if problems:
        raise ConfigError(problems)


def _name_conflicts(enabled: Iterable[tuple[EntryPoint, Origin]]) -> tuple[tuple[str, ...], set[str]]:
    owners: dict[str, list[Origin]] = {}
    for point, origin in enabled:
        owners.setdefault(point.name, []).append(origin)
    conflicts = []
    for name, origins in owners.items():
        if len(origins) < 2:
            continue
        message = f"two plugins are called {name!r}: one of {origins[0]}, one of {origins[1]}"
        if origins[0].builtin:
            message += f"; a plugin may not shadow a built-in one, so {origins[1].distribution} must rename its own"
        conflicts.append(f"{message}; uninstall one of the two distributions")
    return tuple(conflicts), {name for name, origins in owners.items() if len(origins) > 1}


def _broken(point: EntryPoint, origin: Origin, error: BaseException) -> BrokenPlugin:
    text = str(error) if isinstance(error, PluginError) else describe(error, point.module)
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install {error.name.partition('.')[0]!r}, or reinstall {origin.distribution}"
    else:
        remedy = f"update or uninstall {origin.distribution}"
    return BrokenPlugin(point.name, origin, text, f"{remedy}, or add {point.name!r} to plugins.disable")
