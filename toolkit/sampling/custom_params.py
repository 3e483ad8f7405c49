"""For logits processors and samplers with their own parameters: reading them from a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import SamplingParams

T = TypeVar("T", bound=msgspec.Struct)


def read_params(params: SamplingParams, name: str, model: type[T]) -> T | None:
    """Return what a request says to the processor that is called `name`, as a msgspec struct; None where it says
    nothing.

    Constraints stand in the struct (``Annotated[float, msgspec.Meta(ge=0, le=10)]``); with ``forbid_unknown_fields`` a
    misspelt name is an error too. Raises InvalidRequest naming the parameter as ``custom_params.<name>.<parameter>``.
    """
    said = params.extra.get(name)
    if said is None:
        return None
    try:
        return msgspec.convert(said, model)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        field = f"custom_params.{name}{place.rstrip('`').partition('[')[0]}"
        raise InvalidRequest(f"{field}: {text}", param=field) from None
