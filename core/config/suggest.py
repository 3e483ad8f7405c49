"""What may have been meant by a key, a flag or a variable that there is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pegboard.core.config.shape import CORE, Shape, sections_of
from pegboard.core.config.sources import ENV_PREFIX
from pegboard.toolkit.system.blame import told
from pegboard.toolkit.text.near_names import did_you_mean, nearest
from pegboard.toolkit.text.other_servers import Answer, answers_of

_CLOSE = 0.75
"""Likeness from which a key of another section may be meant: short names are alike by chance."""
_MOST = 3
"""Sections that have a key of one name; more of them say nothing."""


def other_servers(shape: Shape = CORE) -> Mapping[str, Answer]:
    """Return the answers to flags and keys of vLLM and SGLang, by their names in small letters with underscores: those
    of the core, and of the plugins that count. Raises PluginError for a table of a plugin that cannot be read.
    """
    own = answers_of("pegboard.core.config:other_servers.yaml")
    found = {**own}
    for loaded in shape.active:
        if table := loaded.plugin.other_servers:
            with told(loaded.part(table, "other_servers"), "cannot be read"):
                found |= answers_of(table)
    return {**found, **own}


def _plain(name: str) -> str:
    """Return a flag or key as the table has it: ``--Max-Model-Len`` as ``max_model_len``."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def known_key(key: str, value: object, siblings: Sequence[str], shape: Shape = CORE) -> str:
    """Return what to write instead of an unknown `key` of a section with the keys `siblings`; "": nothing is close."""
    name = _plain(key)
    if (answer := other_servers(shape).get(name)) and name not in siblings:
        return answer.told(f"use {answer.key}")
    if name in siblings:
        return f"did you mean {name!r}?"
    if found := _named(name, shape, section=isinstance(value, Mapping)):
        return _meant(found)
    if nearest(name, siblings, cutoff=_CLOSE) or not (close := _like(name, shape)):
        return did_you_mean(key, siblings)
    return _meant(close)


def known_option(flag: str, shape: Shape = CORE, *, close: bool = True) -> str:
    """Return what to write instead of an unknown `flag` of a command that takes a config; "" where there is nothing.
    Without `close` similar names do not count.
    """
    name = _plain(flag)
    if answer := other_servers(shape).get(name):
        return answer.told(f"use --set {answer.key}=...")
    found = _named(name, shape, section=False) or (_like(name, shape) if close else [])
    return " or ".join(f"use --set {path}=..." for path in found)


def unread_variables(environment: Mapping[str, str], shape: Shape = CORE) -> tuple[str, ...]:
    """Return a warning for each variable that reads as a key of the config and is none, for want of an underscore."""
    joined = {path.replace(".", "_"): path for path, _ in _paths(shape)}
    found = []
    for name, value in sorted(environment.items()):
        if not name.startswith("PEGBOARD_") or name.startswith(ENV_PREFIX):
            continue
        # Kubernetes gives every container such variables about a service of this name.
        if (path := joined.get(name.removeprefix("PEGBOARD_").lower().replace("__", "_"))) and "://" not in value:
            right = f"{ENV_PREFIX}{path.replace('.', '__').upper()}"
            found.append(f"the variable {name} is not read; {right} sets {path}")
    return tuple(found)


def _meant(paths: Sequence[str]) -> str:
    return f"did you mean {' or '.join(repr(path) for path in paths)}?"


def _named(name: str, shape: Shape, *, section: bool) -> list[str]:
    """Return the paths that end in this name, or are it with underscores; of the right kind, where there are such."""
    found = [(path, kind) for path, kind in _paths(shape) if name in (path.rpartition(".")[2], path.replace(".", "_"))]
    right = [path for path, kind in found if kind == section] or [path for path, _ in found]
    return right if len(right) <= _MOST else []


def _like(name: str, shape: Shape) -> list[str]:
    names = {path.rpartition(".")[2] for path, kind in _paths(shape) if not kind}
    close = nearest(name, sorted(names), limit=1, cutoff=_CLOSE)
    return _named(close[0], shape, section=False) if close else []


def _paths(shape: Shape) -> Iterator[tuple[str, bool]]:
    """Yield the path of every key of the sections, and whether that is a section."""
    for section, model in sections_of(shape):
        for key in model.model_fields:
            path = f"{section}.{key}" if section else key
            yield path, shape.section_at(path) is not None
