"""Where config values come from: presets, files, the environment, options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.text import plain_trees
from pegboard.toolkit.text.dotted_trees import tree_of
from pegboard.toolkit.text.near_names import did_you_mean
from pegboard.toolkit.text.plain_trees import TOO_DEEP, plain_section, read_yaml

ENV_PREFIX = "PEGBOARD__"
DEFAULT_PRESET = "default"


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


def read_file(path: str | Path) -> Layer:
    """Return a YAML, TOML or JSON file, by its ending. Raises ConfigError with the place where it cannot be read."""
    return Layer(str(Path(path)), *plain_trees.read_file(Path(path)))


def read_environment(environment: Mapping[str, str]) -> Layer:
    """``PEGBOARD__SERVER__PORT=31000`` sets server.port. Values are read as YAML."""
    pairs = (
        (name, name.removeprefix(ENV_PREFIX).lower().replace("__", "."), value)
        for name, value in sorted(environment.items())
        if name.startswith(ENV_PREFIX)
    )
    return Layer("environment", *tree_of(pairs))


def read_overrides(overrides: Iterable[str]) -> Layer:
    """``server.port=31000``, as `--set` takes it. Values are read as YAML."""
    pairs = []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(Problem("--set", f"{text!r} must read key=value, such as server.port=31000"))
        pairs.append(("--set", path.strip(), value))
    return Layer("--set", *tree_of(pairs))


def from_mapping(data: Mapping[str, object], name: str) -> Layer:
    """Return values that a program passes, as JSON has them: paths become strings, and tuples lists."""
    try:
        return Layer(name, plain_section(data))
    except RecursionError:
        raise ConfigError(Problem(name, TOO_DEEP)) from None
