"""Plain trees by dotted paths: ``server.port`` is the key `port` of the section `server`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import yaml

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.system.redact import is_secret
from pegboard.toolkit.text.plain_trees import TOO_DEEP, check_keys
from pegboard.toolkit.text.yaml_scalars import Loader

_MOST_PARENTS = 100


def dotted(location: Iterable[int | str]) -> str:
    """Return the path of keys and indices: ``("apis", 0, "use")`` as ``apis[0].use``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def value_at(values: Mapping[str, object], path: str, default: object = None) -> object:
    """Return what stands at a path of a tree."""
    value: object = values
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path of each value of a tree, and the value. Lists are values, but for those of sections."""
    if isinstance(value, Mapping) and (value or not path):
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, child in enumerate(value):
            yield from leaves(child, f"{path}[{index}]")
    else:
        yield path, value


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Return what set the value at a path. An entry of a list cites the list, and a key that is not set the default."""
    return origins.get(path) or (origins.get(path.partition("[")[0], "default") if "[" in path else "default")


def nested(path: str, value: object) -> dict[str, object]:
    """Return a tree with one value."""
    parents, _, last = path.rpartition(".")
    tree = {last: value}
    return nested(parents, tree) if parents else tree


def tree_of(pairs: Iterable[tuple[str, str, str]]) -> tuple[dict[str, object], dict[str, str]]:
    """Return the tree of (origin, path, text) each, in which texts are read as YAML, and the origin of each path.

    Raises ConfigError, naming path and origin, for what is nested too deeply, has keys that are not strings, or is to
    stand in a section that is a value of another pair.
    """
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
    return data, origins


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
