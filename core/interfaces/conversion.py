"""Structs whose constructors take what people pass: a text for a list of one, a numpy row, "5" for a token id.

Each field is converted by its annotation, so that a new field needs nothing here. What cannot be converted raises
InvalidRequest, which names the field.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from typing import TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest

T = TypeVar("T")
Convert = Callable[[str, object], object]
"""Makes a value of a field's type of what was passed for the field of this name."""

_SHOWN = 60


class Converting(msgspec.StructMeta):
    """Metaclass of such structs. None stands for a field's default, unless None is a value of the field.

    Decoding and `msgspec.structs.replace` convert nothing: values have the right types there.
    """

    def __call__(self, *args: object, **values: object) -> object:
        """Return a struct of what was passed."""
        kinds = _conversions(self)
        found = {}
        for name, value in values.items():
            kind = kinds.get(name)
            if kind is None or type(value) is kind.exact:
                found[name] = value
            elif value is not None or kind.takes_none:
                found[name] = value if value is None else kind.convert(name, value)
        return super().__call__(*args, **found)


class _Kind:
    """How values of one field are converted. One of the type `exact` is right as it is."""

    __slots__ = ("convert", "exact", "takes_none")

    def __init__(self, annotation: object) -> None:
        options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        self.takes_none = type(None) in options
        plain = [one for one in options if one is not type(None)]
        self.exact = plain[0] if len(plain) == 1 and plain[0] in _CALLED else None
        self.convert = _converter(plain[0]) if len(plain) == 1 else functools.partial(_prompt, tuple(plain))


@functools.cache
def _conversions(struct: type) -> Mapping[str, _Kind]:
    return {name: _Kind(annotation) for name, annotation in get_type_hints(struct).items()}


def _converter(annotation: object) -> Convert:
    """Return how values of this type are made. Raises TypeError for a type that has no conversion yet."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and annotation in _SCALARS:
        return _SCALARS[annotation]
    if origin is tuple and arguments[1:] == (...,) and arguments[0] in _SCALARS:
        return functools.partial(_tuple, arguments[0])
    if origin is dict and arguments[0] in _SCALARS:
        return functools.partial(_dict, *arguments)
    if isinstance(annotation, type):
        return functools.partial(_instance, annotation)
    raise TypeError(f"fields of the type {annotation} have no conversion yet; add one to {__name__}")


def _wrong(name: str, wanted: str, value: object, place: str = "") -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return InvalidRequest(f"{name}{place} must be {wanted}, got {shown}", param=name.partition("[")[0])


def _plain(value: object) -> object:
    """Return a number of numpy or torch as Python's own; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def listed(value: object) -> object:
    """Return an array of numpy or torch as lists; anything else as it is."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _scalar(kind: Callable[..., T], name: str, value: object) -> T:
    """Return an int, a float, a bool or a str. A number that is integral is an integer, and 0 and 1 are booleans."""
    value = _plain(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits: dict[object, bool] = {
        int: number and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())),
        float: number,
        bool: isinstance(value, int) and value in (0, 1),
        str: isinstance(value, str),
    }
    if fits[kind]:
        with contextlib.suppress(OverflowError):
            return kind(value)
    raise _wrong(name, _WANTED[kind], value)


_SCALARS: dict[object, Convert] = {
    **{kind: functools.partial(_scalar, kind) for kind in (int, float, bool, str)},
    object: lambda _, value: value,
}
_CALLED: dict[object, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_WANTED: dict[object, str] = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}


def _tuple(kind: type, name: str, value: object) -> tuple[object, ...]:
    """Return several values; one alone is a tuple of one. A tuple that is right stays the same object."""
    if type(value) is tuple and set(map(type, value)) <= {kind}:
        return value
    rows = listed(value)
    if isinstance(rows, str) or not isinstance(rows, list | tuple | set | frozenset):
        rows = (rows,) if _fits(kind, rows) else None
    if rows is None:
        called = _CALLED[kind]
        raise _wrong(name, f"{_WANTED[kind]} or a list of {called}s", value)
    return tuple(_SCALARS[kind](f"{name}[{place}]", one) for place, one in enumerate(rows))


def _fits(kind: type, value: object) -> bool:
    try:
        _SCALARS[kind]("", value)
    except InvalidRequest:
        return False
    return True


def _dict(key: type, kind: object, name: str, value: object) -> dict[object, object]:
    """Return a mapping, with integers for keys that are texts of digits. One that is right stays the same object."""
    if (
        type(value) is dict
        and set(map(type, value)) <= {key}
        and (kind not in _CALLED or set(map(type, value.values())) <= {kind})
    ):
        return value
    if not isinstance(value, Mapping):
        raise _wrong(name, "a mapping", value)
    convert = _SCALARS.get(kind, _SCALARS[object])
    found = {_key(key, name, one): convert(f"{name}[{one!r}]", each) for one, each in value.items()}
    if len(found) < len(value):
        raise InvalidRequest(f"{name} has a key twice, as a number and as a text", param=name)
    return found


def _key(kind: type, name: str, key: object) -> object:
    if kind is int and isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    if _fits(kind, key):
        return _SCALARS[kind](name, key)
    raise _wrong(name, _WANTED[kind], key, ": a key")


def _instance(kind: type, name: str, value: object) -> object:
    if isinstance(value, kind):
        return value
    raise _wrong(name, f"a {kind.__name__}", value)


def _prompt(kinds: tuple[object, ...], name: str, value: object) -> object:
    """Return what is a prompt. A list is taken as it is: whether token ids are any is checked with the model."""
    known = tuple(one for one in kinds if isinstance(one, type) and get_origin(one) is None)
    return value if isinstance(value, (list, *known)) else token_ids(name, value)


def token_ids(name: str, value: object) -> list[int]:
    """Return token ids of a list, tuple, numpy or torch row. Raises InvalidRequest, naming the place, for others."""
    rows = listed(value)
    if not isinstance(rows, list | tuple):
        raise _wrong(name, "a text or a list of token ids", value)
    if type(rows) is list and set(map(type, rows)) <= {int}:
        return rows
    return [_scalar(int, f"{name}[{place}]", one) for place, one in enumerate(rows)]
