"""Where config values come from: presets, files, the environment, options of the command line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import yaml

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.system.redact import is_secret
from pegboard.toolkit.text.near_names import did_you_mean
from pegboard.toolkit.text.yaml_scalars import Loader, WrittenFloat, written_int

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
    data, _ = _read_yaml(preset_text(name), f"preset {name}")
    return Layer("default" if name == DEFAULT_PRESET else f"preset {name}", data)


def is_preset(origin: str) -> bool:
    """Return whether a value with this origin stands in a preset, and not in what the operator has written."""
    return origin == DEFAULT_PRESET or origin in {f"preset {name}" for name in preset_names()}


def preset_text(name: str) -> str:
    return (resources.files("pegboard.core.config") / "presets" / f"{name}.yaml").read_text("utf-8")


_MOST_PARENTS = 100
_TOO_DEEP = "is nested too deeply, or holds itself (a YAML alias inside of its own anchor)"


def read_file(path: str | Path) -> Layer:
    """Return a YAML, TOML or JSON file, by its ending. Raises ConfigError with file and line where it cannot be
    read.
    """
    path = Path(path)
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}
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
        raise ConfigError(Problem(str(path), _TOO_DEEP)) from None
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
        return Layer(name, _plain_section(data))
    except RecursionError:
        raise ConfigError(Problem(name, _TOO_DEEP)) from None


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
        _check_keys(value, path)
        return value
    except yaml.YAMLError:
        return text
    except RecursionError:
        raise ConfigError(Problem(path, _TOO_DEEP, origin)) from None
    except ValueError as error:
        raise ConfigError(Problem(path, str(error), origin)) from None


def _read_yaml(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    loader = None
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        origins: dict[str, str] = {}
        _walk_yaml(node, "", name, origins, set())
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(Problem(place, f"not valid YAML: {error.problem or error.context}")) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f"{name}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        wrong = f"not valid YAML: the character U+{ord(text[error.position]):04X} cannot stand in a file; is it UTF-8?"
        raise ConfigError(Problem(place, wrong)) from None
    except yaml.YAMLError as error:
        raise ConfigError(Problem(name, f"not valid YAML: {error}")) from error
    finally:
        if loader is not None:
            loader.dispose()
    return _top(data, name), origins


def _walk_yaml(node: yaml.Node, path: str, name: str, origins: dict[str, str], seen: set[int]) -> None:
    """Note the line of every key; refuse a key that stands twice, which YAML readers let pass."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            origins[f"{path}[{index}]"] = f"{name}:{item.start_mark.line + 1}"
            _walk_yaml(item, f"{path}[{index}]", name, origins, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    keys: set[str] = set()
    for key, value in node.value:
        text = str(key.value)
        if text in keys and text != "<<":
            raise yaml.MarkedYAMLError(problem=f"the key {text!r} stands here twice", problem_mark=key.start_mark)
        keys.add(text)
        child = f"{path}.{text}" if path else text
        origins[child] = f"{name}:{key.start_mark.line + 1}"
        _walk_yaml(value, child, name, origins, seen)


def _read_toml(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    try:
        return _top(tomllib.loads(text, parse_float=WrittenFloat), name), {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(Problem(name, f"not valid TOML: {error}")) from error


def _read_json(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise ConfigError(Problem(name, f"not valid: the key {twice!r} stands twice in one object"))
        return out

    try:
        return _top(
            json.loads(text, object_pairs_hook=unique, parse_float=WrittenFloat, parse_int=written_int), name
        ), {}
    except json.JSONDecodeError as error:
        raise ConfigError(Problem(f"{name}:{error.lineno}:{error.colno}", f"not valid JSON: {error.msg}")) from error
    except ValueError as error:
        # Numbers with thousands of digits.
        raise ConfigError(Problem(name, f"not valid JSON: {error}")) from error


def _top(data: object, name: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(Problem(name, f"must hold keys and values, not a {_kind(data)}"))
    try:
        _check_keys(data, "")
    except ValueError as error:
        raise ConfigError(Problem(name, str(error))) from None
    return _plain_section(data)


def _check_keys(value: object, path: str) -> None:
    """Raise ValueError naming a key that is not a string, where there is one."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path or 'top level'}: the key {_key(key)} is not a string; put it in quotes")
            _check_keys(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _check_keys(child, f"{path}[{index}]")


def _key(key: Hashable) -> str:
    return f"{key!r} ({_kind(key)})"


def _kind(value: object) -> str:
    kind = next((one for one in (bool, int, float) if isinstance(value, one)), type(value))
    return kind.__name__


def _plain_section(section: Mapping[str, object]) -> dict[str, object]:
    return {str(key): _plain(child) for key, child in section.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return _plain_section(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(child) for child in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
