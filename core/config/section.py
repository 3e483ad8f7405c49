"""What all sections of the config are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AUTO = "auto"
"""`use: auto` picks the highest ranked provider whose requirements are met and that supports model and device."""

PositiveInt = Annotated[int, Field(gt=0)]
NameList = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [] if value is None else [value]),
]


class Section(BaseModel):
    """Base of all sections: frozen, strict about unknown keys, described by its docstrings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, protected_namespaces=()
    )


class UseSection(Section):
    """A section that chooses one provider."""

    use: str = AUTO
    """Name of the provider, or `auto`."""
