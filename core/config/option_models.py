"""Models of the sections as this config needs them: the core's keys and the chosen providers' options."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from pegboard.core.config.section import Section
from pegboard.core.config.sections import EngineConfig
from pegboard.core.config.shape import core_keys, subsection
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.options import NoOptions, Options
from pegboard.core.registry.records import ProviderRecord

ModelT = TypeVar("ModelT", bound=BaseModel)


def derived(name: str, base: type[ModelT], **fields: Any) -> type[ModelT]:
    """pydantic's create_model for a model that is in no source file.

    Its docstrings are its bases'. Looking for its own goes through every frame and every loaded module, which takes
    half a second in a process that has loaded many.
    """
    return create_model(name, __base__=base, __cls_kwargs__={"use_attribute_docstrings": False}, **fields)


def with_options(section: type[Section], path: str, record: ProviderRecord) -> type[Section]:
    """Return the section with the options of `record` beside the core's keys; PluginError where two are called
    alike.
    """
    options = record.options_model()
    if options is NoOptions:
        return section
    clash = sorted(core_keys(path) & set(options.model_fields)) or sorted({"use"} & set(options.model_fields))
    if clash:
        raise PluginError(
            f"{record.describe()}: its option {clash[0]!r} has the name of a core key of the section "
            f"{path!r}; {record.origin.distribution} must rename it"
        )
    return _combine(section, options, record.name)


def _combine(section: type[Section], options: type[Options], name: str) -> type[Section]:
    """Return a subclass of both: the options' own validators run, the section's strictness holds."""
    bases: Any = (options, section)
    model: type[Section] = derived(f"{section.__name__}[{name}]", bases)
    return model


def tolerant(section: type[Section]) -> type[Section]:
    """Return the section with any further key allowed: for one whose provider is unknown, so that only that is
    reported.
    """

    class Tolerant(section):  # type: ignore[valid-type,misc]
        model_config = {"extra": "allow"}

    return Tolerant


def engine_model(
    sections: Mapping[str, type[Section]], lists: Mapping[str, Iterable[type[Section]]]
) -> type[EngineConfig]:
    """EngineConfig with the section at each dotted path, and the entries of each list, replaced."""
    widened: type[EngineConfig] = _widen(EngineConfig, "", sections, lists)
    return widened


def _widen(
    model: type[Section],
    path: str,
    sections: Mapping[str, type[Section]],
    lists: Mapping[str, Iterable[type[Section]]],
) -> Any:
    """`model`, or what replaces it, with everything below replaced too."""
    base = sections.get(path, model)
    fields: dict[str, object] = {}
    for key, info in model.model_fields.items():
        below = f"{path}.{key}" if path else key
        if below in lists:
            fields[key] = (types.GenericAlias(tuple, tuple(lists[below])), _default(info, ()))
        child = subsection(model, key)
        if child is None:
            continue
        if any(one == below or one.startswith(f"{below}.") for one in (*sections, *lists)):
            fields[key] = (wide := _widen(child, below, sections, lists), _default(info, wide))
    return derived(base.__name__, base, **fields) if fields else base


def _default(info: FieldInfo, default: object) -> object:
    if info.is_required():
        return Field(description=info.description)
    if callable(default):
        return Field(default_factory=default, description=info.description)
    return Field(default=default, description=info.description)
