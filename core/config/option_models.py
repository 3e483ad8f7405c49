"""Models of the sections as this config needs them: the core's keys and the chosen providers' options."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

from pegboard.core.config.sections import EngineConfig
from pegboard.core.config.shape import Shape, subsection
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.options import NoOptions, SectionFields
from pegboard.core.registry.records import ProviderRecord
from pegboard.toolkit.system.pydantic_models import derived, with_default


def with_options(section: type[SectionFields], path: str, record: ProviderRecord) -> type[SectionFields]:
    """Return the section at `path` with the options of `record`. Raises PluginError where two keys are called alike."""
    options = record.options_model()
    if options is NoOptions:
        return section
    clash = sorted(section.model_fields.keys() & options.model_fields.keys())
    if clash:
        raise PluginError(
            f"{record.describe()}: its option {clash[0]!r} has the name of a core key of the section "
            f"{path!r}; {record.origin.distribution} must rename it"
        )
    return derived(f"{section.__name__}[{record.name}]", section, mixins=[options])


def tolerant(section: type[SectionFields]) -> type[SectionFields]:
    """Return the section with any further key allowed: of an unknown provider only that is to be reported."""

    class Tolerant(section):  # type: ignore[valid-type,misc]
        model_config = {"extra": "allow"}

    return Tolerant


def engine_model(
    shape: Shape, sections: Mapping[str, type[SectionFields]], lists: Mapping[str, Iterable[type[SectionFields]]]
) -> type[EngineConfig]:
    """Return the model of the shape with the section at each dotted path, and the entries of each list, replaced."""
    widened: type[EngineConfig] = _widen(shape.model, "", sections, lists)
    return widened


def _widen(
    model: type[SectionFields],
    path: str,
    sections: Mapping[str, type[SectionFields]],
    lists: Mapping[str, Iterable[type[SectionFields]]],
) -> Any:
    """`model`, or what replaces it, with everything below replaced too."""
    base = sections.get(path, model)
    fields: dict[str, object] = {}
    for key, info in model.model_fields.items():
        below = f"{path}.{key}" if path else key
        if below in lists:
            fields[key] = (types.GenericAlias(tuple, tuple(lists[below])), with_default(info, ()))
        child = subsection(model, key)
        if child is None:
            continue
        if any(one == below or one.startswith(f"{below}.") for one in (*sections, *lists)):
            fields[key] = (wide := _widen(child, below, sections, lists), with_default(info, wide))
    return derived(base.__name__, base, fields) if fields else base
