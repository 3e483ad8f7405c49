"""`sampling_defaults` of the config: defaults of parameters that requests leave out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SAMPLING_DEFAULTS, SamplingParams
from pegboard.toolkit.text.near_names import or_hint


def _checked(value: object) -> object:
    """Return `value`. Raises ValueError for what is not a setting, and for a parameter that is wrong."""
    if value in ("model", "none"):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"must be model, none, or parameters such as {{temperature: 0.6}}, got {value!r}")
    for name in value:
        if name not in SAMPLING_DEFAULTS:
            known = ", ".join(SAMPLING_DEFAULTS)
            raise ValueError(f"there is no default for {name!r}; {or_hint(name, SAMPLING_DEFAULTS)}there are: {known}")
        if value[name] is None:
            raise ValueError(f"{name} needs a value; without it the model's own holds")
    try:
        SamplingParams(**value).validate_numbers()
    except InvalidRequest as error:
        raise ValueError(error.message) from None
    return value


SamplingDefaults = Annotated[Literal["model", "none"] | dict[str, int | float], BeforeValidator(_checked)]
