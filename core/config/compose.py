"""Composing a config: from files, environment and options to one frozen, checked whole.

    resolved = compose(["server.yaml"], overrides=["server.port=31000"])
    resolved.engine.server.port                  # the frozen EngineConfig
    resolved.candidates["attention"]             # providers that may serve a contract; see pegboard.core.config.select
    ResolvedConfig.from_json(resolved.to_json()) # in another process, with the same plugins or not at all

Order, later ones win: the default preset, the preset that `preset` names, files in their order, the environment
(``PEGBOARD__SERVER__PORT``), a model named beside the files, options. Everything that is wrong is raised at once, as
one ConfigError.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pegboard.core.config.arguments import read_arguments
from pegboard.core.config.body_fields import declaring, shared_fields
from pegboard.core.config.merge import Merged, default_layers
from pegboard.core.config.option_models import engine_model, tolerant, with_options
from pegboard.core.config.problems import problems_of
from pegboard.core.config.requires import part_params, solve
from pegboard.core.config.resolve import Resolution, resolve
from pegboard.core.config.section import UseSection
from pegboard.core.config.sections import EngineConfig
from pegboard.core.config.shape import SWITCHES, Shape, switches_of
from pegboard.core.config.sources import Layer, from_mapping, is_preset, read_environment, read_overrides, read_preset
from pegboard.core.config.suggest import unread_variables
from pegboard.core.interfaces.contract import Cardinality
from pegboard.core.interfaces.errors import ConfigError, PluginError, Problem
from pegboard.core.interfaces.options import NoOptions, Options, SectionFields
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.lock import PluginLock
from pegboard.core.registry.records import MissingExtra, ProviderRecord
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.blame import place_of
from pegboard.toolkit.system.redact import is_secret
from pegboard.toolkit.text.dotted_trees import value_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """One engine's config with everything that belongs to it. Equal config and plugins give an equal `to_json()`.

    `candidates` has, per contract, the providers that may be chosen, best first: one where the config names it, and
    for a list all of it, in its order. `reasons` says why others went. `origins` cites what set each value of `values`,
    the merged plain tree; what stands in neither is a default. `warnings` are about what was not read at all.
    """

    engine: EngineConfig
    values: Mapping[str, object]
    origins: Mapping[str, str]
    registry: Registry
    shape: Shape
    candidates: Mapping[str, tuple[ProviderRecord, ...]]
    named: frozenset[str]
    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def lock(self) -> PluginLock:
        return self.registry.lock

    def options(self, record: ProviderRecord) -> Options:
        """Return the options of a chosen provider: what the config says, or its defaults where `auto` chose it."""
        with record.told("checking its options"):
            options = record.options_model().model_validate(_option_values(self.values, record, self.shape))
        return self._with_sections(options, record.plugin)

    @functools.cached_property
    def plugin_options(self) -> Mapping[str, Options]:
        """The options of the hook classes of every plugin that is on, by its name."""
        found = {}
        for name, plugin in ((loaded.plugin.name, loaded.plugin) for loaded in self.shape.active):
            section = getattr(self.engine.plugins, name, None)
            found[name] = self._with_sections(section if isinstance(section, Options) else NoOptions(), plugin)
        return found

    def provides(self, record: ProviderRecord) -> frozenset[str]:
        """Return the capabilities that a provider has with its options."""
        return _provides(self.values, record, self.shape)

    @property
    def said(self) -> frozenset[str]:
        """The paths of the keys that the operator has set."""
        return frozenset(path for path, origin in self.origins.items() if not is_preset(origin))

    def requiring(self, contract: str, of: str, capability: str) -> tuple[list[str], list[str]]:
        """Return which providers of a contract require a capability of another's: the names of those that may be
        chosen, and of all that are installed.
        """

        def names(records: Iterable[ProviderRecord]) -> list[str]:
            needs = {one: {(need.contract, need.capability) for need in one.provider.requires} for one in records}
            return [one.name for one, needed in needs.items() if (of, capability) in needed]

        return names(self.candidates[contract]), names(self.registry.providers(contract))

    def _with_sections(self, options: Options, plugin: Plugin) -> Options:
        """Return the options, with the sections to which the plugin adds fields."""
        paths = (path.split(".") if path else [] for path in plugin.fields)
        options._sections = tuple(functools.reduce(getattr, keys, self.engine) for keys in paths)
        return options

    def warn(self) -> None:
        """Log the warnings, once logging is set up."""
        for warning in self.warnings:
            logger.warning("%s", warning)

    def to_json(self, *, keys: bool = True) -> str:
        """Return what another process needs to compose the same; see `from_json`. Without `keys`, those of the server
        are left out, which only the process that speaks HTTP needs.
        """
        values = dict(self.values)
        server = values.get("server")
        if not keys and isinstance(server, Mapping):
            values["server"] = {name: value for name, value in server.items() if not is_secret(name)}
        return json.dumps(
            {"values": values, "origins": dict(self.origins), "lock": self.lock.to_dict()}, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str, registry: Registry | None = None) -> ResolvedConfig:
        """Compose again from `to_json()`, with exactly the locked plugins; PluginError where those are not here."""
        data = json.loads(text)
        lock = PluginLock.from_dict(data["lock"])
        registry = (registry or Registry.discover(_disabled(data["values"]))).restricted(lock.names)
        lock.verify(registry.lock)
        merged = Merged(shape=Shape.of(registry, switches_of(data["values"])))
        merged.data, merged.origins = data["values"], data["origins"]
        return _compose(merged, registry)


def compose(
    files: Iterable[str | Path] = (),
    *,
    overrides: Iterable[str] = (),
    options: Iterable[Layer] = (),
    data: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> ResolvedConfig:
    """Merge, resolve and check. Raises ConfigError with every problem. Names that two plugins claim stop
    only a config that uses them.

    A name among `files` that does not end as a config file's does is the model's (`model.path`). `data` is one more
    layer after the files, for programs; `options` are further ones before the `overrides`. `env` None is this process's
    environment. A `registry` given here is used as it is, except that `plugins.disable` leaves out plugins of it.
    """
    layers, model = read_arguments(files)
    if data is not None:
        layers.append(from_mapping(data, "program"))
    environment = os.environ if env is None else env
    layers += [read_environment(environment), *model, *options, read_overrides(overrides)]
    preset = next((layer.data["preset"] for layer in reversed(layers) if "preset" in layer.data), None)
    if isinstance(preset, str):
        layers.insert(0, read_preset(preset))
    # What plugins there are says which sections there are, and so how all others are merged.
    first = Merged(Layer(one.name, {SWITCHES: one.data[SWITCHES]}) for one in layers if SWITCHES in one.data).data
    disabled = _disabled(first)
    found = Registry.discover(disabled) if registry is None else registry.without(disabled)
    shape = Shape.of(found, switches_of(first))
    merged = Merged([*default_layers(shape), *layers], shape)
    return replace(_compose(merged, found), warnings=unread_variables(environment, shape))


def _disabled(values: Mapping[str, object]) -> dict[str, str]:
    """Return the plugins that a config leaves out, each with the key that says so."""
    section = values.get(SWITCHES)
    names = section.get("disable") if isinstance(section, Mapping) else None
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    off = {name: f"{SWITCHES}.{name}" for name, value in switches_of(values).items() if value is False}
    return {**off, **dict.fromkeys(listed, f"{SWITCHES}.disable")}


def _compose(merged: Merged, registry: Registry) -> ResolvedConfig:
    resolution = resolve(merged, registry)
    problems = list(resolution.problems)
    model = _model(resolution, problems, merged)
    engine = None
    try:
        engine = model.model_validate(_input(merged.data, merged.shape))
    except ValidationError as error:
        problems += _beside(problems_of(error, model, merged, registry), problems)
    except Exception as error:
        raise _in_options(error, resolution, merged.shape) from error
    solution = solve(resolution.candidates, registry, lambda record: _provides(merged.data, record, merged.shape))
    part_params(solution)
    problems += solution.problems
    problems += shared_fields(declaring(solution.candidates))
    if problems or engine is None:
        raise ConfigError(problems)
    return ResolvedConfig(
        engine,
        merged.data,
        merged.origins,
        registry,
        merged.shape,
        solution.candidates,
        frozenset(resolution.named),
        solution.reasons,
    )


def _in_options(error: Exception, resolution: Resolution, shape: Shape) -> Exception:
    """Return what a validator raised that is not a ValidationError: a PluginError that names whose it is."""
    for records in resolution.candidates.values():
        for record in records:
            if place_of(error, record.provider.config.partition(":")[0]):
                return record.error("checking its options", error)
    for loaded in shape.active:
        for name in filter(None, (loaded.plugin.config, *loaded.plugin.fields.values())):
            if place_of(error, name.partition(":")[0]):
                return loaded.part(name, "options").error("failed", error)
    return error


def _beside(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Return those of `found` that are not about a place that `known` has said what is wrong with."""
    places = tuple(problem.path for problem in known)
    below = tuple(f"{place}{mark}" for place in places for mark in ".[")
    return [problem for problem in found if problem.path not in places and not problem.path.startswith(below)]


def _model(resolution: Resolution, problems: list[Problem], merged: Merged) -> type[EngineConfig]:
    """Return the config's model, with the options of every provider that the config names. Only those are imported."""
    sections: dict[str, type[SectionFields]] = {}
    lists: dict[str, list[type[SectionFields]]] = {}
    shape = merged.shape
    for path, contract in shape.uses.items():
        section = shape.section_at(path) or UseSection
        if contract.name in resolution.named:
            record = resolution.candidates[contract.name][0]
            sections[path] = _with_options(section, path, record, problems, merged)
        elif contract.name not in resolution.candidates:
            sections[path] = tolerant(section)
    for path, contract in shape.lists.items():
        if contract.name in resolution.candidates:
            lists[path] = [
                _with_options(UseSection, f"{path}[{index}]", record, problems, merged)
                for index, record in enumerate(resolution.candidates[contract.name])
            ]
        elif isinstance(entries := merged.get(path), list):
            lists[path] = [tolerant(UseSection)] * len(entries)
    return engine_model(shape, sections, lists)


def _with_options(
    section: type[SectionFields], path: str, record: ProviderRecord, problems: list[Problem], merged: Merged
) -> type[SectionFields]:
    try:
        with record.told("its options"):
            return with_options(section, path, record)
    except MissingExtra as error:
        use = f"{path}.use"
        problems.append(Problem(use, f"{record} cannot be used: {error}", merged.origin(use)))
        return tolerant(section)


def _input(values: Mapping[str, object], shape: Shape) -> dict[str, object]:
    """Return the values with every list entry as a section, and every section there, so that errors name full paths."""
    out = dict(values)
    out.setdefault("model", {})
    for path in shape.lists:
        if isinstance(entries := value_at(out, path), list):
            _replace(out, path.split("."), [{"use": entry} if isinstance(entry, str) else entry for entry in entries])
    for name, value in switches_of(out).items():
        if value is True and shape.section_at(f"{SWITCHES}.{name}"):
            _replace(out, [SWITCHES, name], {})
        elif value == {} and not shape.section_at(f"{SWITCHES}.{name}"):
            _replace(out, [SWITCHES, name], True)
    return out


def _replace(values: dict[str, object], keys: Sequence[str], new: object) -> None:
    """Replace what stands below `keys`, in copies of the sections on the way."""
    *parents, last = keys
    for key in parents:
        section = values[key]
        assert isinstance(section, Mapping)
        values[key] = values = dict(section)
    values[last] = new


def _provides(values: Mapping[str, object], record: ProviderRecord, shape: Shape) -> frozenset[str]:
    """Return what is declared, less what its options leave out; bad options, which others report, leave out nothing."""
    declared = record.provides
    if not declared or not record.provider.config:
        return declared
    try:
        options = record.options_model().model_validate(_option_values(values, record, shape))
    except Exception:
        return declared
    with record.told("provides of its options"):
        return declared & options.provides(declared)


def _option_values(values: Mapping[str, object], record: ProviderRecord, shape: Shape) -> dict[str, object]:
    path = record.contract.config_path
    if record.contract.cardinality is Cardinality.MANY:
        entries = value_at(values, path)
        named = entries if isinstance(entries, list) else []
        entry = next((one for one in named if isinstance(one, Mapping) and one.get("use") == record.name), {})
        return {key: value for key, value in entry.items() if key != "use"}
    section: Any = values
    for key in path.split("."):
        section = section.get(key, {})
    if section.get("use") != record.name:
        return {}
    return {key: value for key, value in section.items() if key not in shape.core_keys(path)}


__all__ = ["ConfigError", "PluginError", "ResolvedConfig", "compose"]
