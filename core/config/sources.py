"""Where config values come from: presets, files, the environment, options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import yaml

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.system.redact import is_secret
from pegboard.toolkit.text.near_names import did_you_mean
from pegboard.toolkit.text.plain_trees import TOO_DEEP, check_keys, plain_section, read_json, read_toml, read_yaml
from pegboard.toolkit.text.yaml_scalars import Loader

ENV_PREFIX = "PEGBOARD__"
DEFAULT_PRESET = "default"
FILE_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
"""How the names of config files end."""


@dataclass(frozen=True)
class Layer:
    """One source's values as a plain tree. `origins` cites the place of a dotted path, `name` that of all others."""

    name: str
    data: Mapping[str, object]
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        return self.origins.get(path, self.name)


def preset_names() -> list[str]:
    """Return the presets that a config can name; the default one, which all start from, is not among them."""
    names = (entry.name for entry in (resources.files("pegboard.core.config") / "presets").iterdir())
    return sorted(
        name.removesuffix(".yaml") for name in names if name.endswith(".yaml") and name != f"{DEFAULT_PRESET}.yaml"
    )


def read_preset(name: str) -> Layer:
    """Read a preset. Raises ConfigError for an unknown name."""
    if name != DEFAULT_PRESET and name not in preset_names():
        hint = did_you_mean(name, preset_names())
        parts = (f"there is no preset {name!r};", hint, f"known: {', '.join(preset_names())}")
        raise ConfigError(Problem("preset", " ".join(part for part in parts if part)))
    data, _ = read_yaml(preset_text(name), f"preset {name}")
    return Layer("default" if name == DEFAULT_PRESET else f"preset {name}", data)


def is_preset(origin: str) -> bool:
    """Return whether a value with this origin stands in a preset, and not in what the operator has written."""
    return origin == DEFAULT_PRESET or origin in {f"preset {name}" for name in preset_names()}


def preset_text(name: str) -> str:
    return (resources.files("pegboard.core.config") / "presets" / f"{name}.yaml").read_text("utf-8")


_MOST_PARENTS = 100


def read_file(path: str | Path) -> Layer:
    """Return a YAML, TOML or JSON file, by its ending. Raises ConfigError with file and line where it cannot be
    read.
    """
    path = Path(path)
    readers = {".yaml": read_yaml, ".yml": read_yaml, ".toml": read_toml, ".json": read_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(Problem(str(path), f"a config file ends in {', '.join(readers)}"))
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(Problem(str(path), "there is no such file")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: it is not UTF-8 ({error})")) from error
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error}")) from error
    try:
        data, origins = reader(text, str(path))
    except RecursionError:
        raise ConfigError(Problem(str(path), TOO_DEEP)) from None
    return Layer(str(path), data, origins)


def read_environment(environment: Mapping[str, str]) -> Layer:
    """``PEGBOARD__SERVER__PORT=31000`` sets server.port. Values are read as YAML."""
    return _from_pairs(
        "environment",
        (
            (name, name.removeprefix(ENV_PREFIX).lower().replace("__", "."), value)
            for name, value in sorted(environment.items())
            if name.startswith(ENV_PREFIX)
        ),
    )


def read_overrides(overrides: Iterable[str]) -> Layer:
    """``server.port=31000``, as `--set` takes it. Values are read as YAML."""
    pairs = []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(Problem("--set", f"{text!r} must read key=value, such as server.port=31000"))
        pairs.append(("--set", path.strip(), value))
    return _from_pairs("--set", pairs)


def from_mapping(data: Mapping[str, object], name: str) -> Layer:
    """Return values that a program passes. Paths become strings and tuples lists, so that the config can travel as
    JSON.
    """
    try:
        return Layer(name, plain_section(data))
    except RecursionError:
        raise ConfigError(Problem(name, TOO_DEEP)) from None


def _from_pairs(name: str, pairs: Iterable[tuple[str, str, str]]) -> Layer:
    data: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, path, text in pairs:
        *parents, last = path.split(".")
        if len(parents) > _MOST_PARENTS:
            raise ConfigError(Problem(f"{path[:40]}...", f"has {len(parents) + 1} levels, too many", origin))
        section = data
        for parent in parents:
            below = section.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ConfigError(Problem(path, f"{parent!r} has been given a value of its own", origin))
            section = below
        section[last] = _scalar(text, path, origin)
        origins[path] = origin
    return Layer(name, data, origins)


def _scalar(text: str, path: str, origin: str) -> object:
    try:
        value = yaml.load(text, Loader=Loader)
        if is_secret(path) and not isinstance(value, str | list):
            # 1e5 is as good a key as any other, and not a number.
            return text.strip() or None
        if value is None and text.strip().lower() not in {"null", "~"}:
            return text.strip()
        check_keys(value, path)
        return value
    except yaml.YAMLError:
        return text
    except RecursionError:
        raise ConfigError(Problem(path, TOO_DEEP, origin)) from None
    except ValueError as error:
        raise ConfigError(Problem(path, str(error), origin)) from None
