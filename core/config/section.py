"""What all sections of the config are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from pegboard.core.interfaces.options import SectionFields

ModelT = TypeVar("ModelT", bound=BaseModel)
Fields = Mapping[str, Any]
"""Fields of a model by name, as pydantic's create_model takes them."""

AUTO = "auto"
"""`use: auto` picks the highest ranked provider whose requirements are met and that supports model and device."""


class Section(SectionFields):
    """Base of the core's sections: frozen, strict about unknown keys, described by its docstrings."""


class UseSection(Section):
    """A section that chooses one provider."""

    use: str = AUTO
    """Name of the provider, or `auto`."""


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
