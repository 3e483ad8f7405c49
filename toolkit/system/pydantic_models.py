"""Models of pydantic that are made of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

ModelT = TypeVar("ModelT", bound=BaseModel)
Fields = Mapping[str, Any]
"""Fields of a model by name, as pydantic's create_model takes them."""


def derived(
    name: str, base: type[ModelT], fields: Fields = MappingProxyType({}), mixins: Sequence[type[BaseModel]] = ()
) -> type[ModelT]:
    """pydantic's create_model for a model that is in no source file: `base` with further fields, and with `mixins`,
    whose validators run as well.

    Its docstrings are its bases'. Looking for its own goes through every frame and every loaded module, which takes
    half a second in a process that has loaded many. Its validator is built on first use: most of them are only the
    base of another one.
    """
    bases: Any = (*mixins, base)
    kwargs = {"use_attribute_docstrings": False, "defer_build": True}
    model: type[ModelT] = create_model(name, __base__=bases, __cls_kwargs__=kwargs, **fields)
    return model


def with_default(info: FieldInfo, default: object) -> object:
    """Return the field again, of another type and with another default; required where it was."""
    if info.is_required():
        return Field(description=info.description)
    if callable(default):
        return Field(default_factory=default, description=info.description)
    return Field(default=default, description=info.description)


def model_at(model: type[BaseModel], location: Iterable[int | str]) -> type[BaseModel] | None:
    """Return the model at a place in another one, by names of fields and places in tuples; None where there is none."""
    current: object = model
    for part in location:
        if isinstance(part, int):
            entries = getattr(current, "__args__", ())
            current = entries[part] if part < len(entries) else None
        else:
            info = current.model_fields.get(part) if hasattr(current, "model_fields") else None
            current = info.annotation if info else None
        if current is None:
            return None
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None
