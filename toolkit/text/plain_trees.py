"""Plain trees, as JSON has them, of YAML, TOML and JSON files. What is wrong raises ConfigError, with the place."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Hashable, Mapping
from pathlib import Path

import yaml

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.text.yaml_scalars import Loader, WrittenFloat, written_int

TOO_DEEP = "is nested too deeply, or holds itself (a YAML alias inside of its own anchor)"
"""What is said of a tree that raises RecursionError."""


def read_yaml(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    """Return a YAML file's tree, and by dotted path the place of each value: ``file:line``."""
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


def read_toml(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    """As `read_yaml`, of TOML and without places."""
    try:
        return _top(tomllib.loads(text, parse_float=WrittenFloat), name), {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(Problem(name, f"not valid TOML: {error}")) from error


def read_json(text: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    """As `read_yaml`, of JSON and without places."""

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


_READERS = {".yaml": read_yaml, ".yml": read_yaml, ".toml": read_toml, ".json": read_json}
FILE_SUFFIXES = tuple(_READERS)
"""How the names of config files end."""


def read_file(path: Path) -> tuple[dict[str, object], dict[str, str]]:
    """As `read_yaml`, of a file: YAML, TOML or JSON, by its ending. Raises ConfigError also where it cannot be read."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(Problem(str(path), f"a config file ends in {', '.join(FILE_SUFFIXES)}"))
    try:
        return reader(path.read_text("utf-8-sig"), str(path))
    except FileNotFoundError:
        raise ConfigError(Problem(str(path), "there is no such file")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: it is not UTF-8 ({error})")) from error
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error}")) from error
    except RecursionError:
        raise ConfigError(Problem(str(path), TOO_DEEP)) from None


def _top(data: object, name: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise ConfigError(Problem(name, f"must hold keys and values, not a {_kind(data)}"))
    try:
        check_keys(data, "")
    except ValueError as error:
        raise ConfigError(Problem(name, str(error))) from None
    return plain_section(data)


def check_keys(value: object, path: str) -> None:
    """Raise ValueError naming a key that is not a string, where there is one."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path or 'top level'}: the key {_key(key)} is not a string; put it in quotes")
            check_keys(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            check_keys(child, f"{path}[{index}]")


def _key(key: Hashable) -> str:
    return f"{key!r} ({_kind(key)})"


def _kind(value: object) -> str:
    kind = next((one for one in (bool, int, float) if isinstance(value, one)), type(value))
    return kind.__name__


def plain_section(section: Mapping[str, object]) -> dict[str, object]:
    """Return a tree in which all that JSON does not have is a text, and every sequence a list."""
    return {str(key): _plain(child) for key, child in section.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return plain_section(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(child) for child in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
