"""For API plugins: the fields of bodies that say how a request is treated, and neither what is read nor how it is
sampled; those that providers declare among them::

    self._body = with_declared(Body, ctx.body_fields)      # once, at the start; it reads and documents them

    body = await parse_body(request, self._body)
    params = body.params_of([n] * len(prompts))            # one for each request of the engine
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, create_model

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.plugin import INDEX, BodyField
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.generation import salt_of
from pegboard.toolkit.http.refusals import RefusingModel

_WHOLE = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that reaches the engine as it is."""

Params = dict[str, Any]
"""What a request says to plugins, by provider name: plain values from the network."""

Told = dict[str, dict[str, object]]
"""What declared fields say to one request, by provider name."""

Declared = tuple[tuple[str, BodyField], ...]
"""Fields, each with the name of its provider."""


class RequestFields(RequestModel):
    """What APIs spell alike about a request. A body passes `priority`, `salt` and `params_of` on to the engine."""

    declared: ClassVar[Declared] = ()
    """Fields that providers declare; see `with_declared`."""

    priority: int = 0
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same one."""
    extra_key: str = ""
    params: Params = {}
    """What the request says to plugins that act on requests (admission gates), by provider name."""

    @property
    def salt(self) -> str:
        """`cache_salt` of the engine's request: both of the names that the field has for it."""
        return salt_of(self.cache_salt, self.extra_key)

    def params_of(self, answers: Sequence[int]) -> Sequence[Params]:
        """Return the `params` of each request that the body makes: `answers` is how many to each prompt, and requests
        stand prompt by prompt. Raises InvalidRequest for a list of another length, and for what is said twice.
        """
        if not self.declared:
            return [self.params] * sum(answers)
        return [_with(self.params, own) for own in self._dealt(answers)]

    def _dealt(self, answers: Sequence[int]) -> list[Told]:
        """Return what declared fields say to each request, by provider."""
        found: list[Told] = [{} for _ in range(sum(answers))]
        for place, (provider, field) in enumerate(self.declared):
            given = getattr(self, _attribute(place))
            if given is None:
                continue
            for own, value in zip(found, _of_each(field.name, given, answers), strict=True):
                if value is not None:
                    own.setdefault(provider, {})[field.name] = value
        if len(found) > 1:
            for index, own in enumerate(found):
                for said in own.values():
                    said[INDEX] = index
        return found


Body = TypeVar("Body", bound=RequestFields)


def with_declared(model: type[Body], body_fields: Mapping[str, Sequence[BodyField]]) -> type[Body]:
    """Return a body with the fields that providers declare, by their names: `ApiContext.body_fields`. Such a field is
    refused no longer where `model` is a RefusingModel. Where there are none, it is `model` itself.
    """
    declared = tuple((provider, field) for provider, fields in body_fields.items() for field in fields)
    return _extended(model, declared) if declared else model


@functools.cache
def _extended(model: type[Body], declared: Declared) -> type[Body]:
    # Under names of their own: a provider's field may be called like a method of the model.
    fields: dict[str, Any] = {}
    for place, (provider, field) in enumerate(declared):
        about = Field(default=None, alias=field.name, description=_meaning(provider, field))
        fields[_attribute(place)] = (_type_of(field), about)
    made = create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)
    made.declared = declared
    plain: type[RequestModel] = made
    if issubclass(plain, RefusingModel):
        names = {field.name for _, field in declared}
        plain.refused = {name: refusal for name, refusal in plain.refused.items() if name not in names}
    return made


def _attribute(place: int) -> str:
    return f"declared_field_{place}"


def _type_of(field: BodyField) -> object:
    kind: Any = _WHOLE if field.kind is int else field.kind
    return kind | list[kind | None] | None if field.each else kind | None


def _meaning(provider: str, field: BodyField) -> str:
    each = "; a list has one for each prompt, or for each answer" if field.each else ""
    return f"{field.meaning} (For {provider}{each}.)".lstrip()


def _of_each(name: str, given: object, answers: Sequence[int]) -> Iterator[object]:
    """Yield what a field says to each request."""
    total = sum(answers)
    if not isinstance(given, list):
        given = [given] * total
    elif len(given) == len(answers) != total:
        given = [value for value, count in zip(given, answers, strict=True) for _ in range(count)]
    elif len(given) != total:
        needed = f"one for each of the {total} requests" if total > 1 else "one, for the one request"
        if len(answers) not in (1, total):
            needed = f"one for each of the {len(answers)} prompts, or of the {total} answers"
        raise InvalidRequest(f"{name} has {len(given)} entries; here a list needs {needed}", param=name)
    return iter(given)


def _with(params: Params, own: Told) -> Params:
    """Return `params` with what declared fields say beside it."""
    found = dict(params)
    for provider, fields in own.items():
        said = params.get(provider)
        if said is not None and not isinstance(said, dict):
            names = ", ".join(name for name in fields if name != INDEX)
            raise InvalidRequest(f"params.{provider} must be an object beside {names}", param=f"params.{provider}")
        for name in fields:
            if name != INDEX and said and name in said:
                raise InvalidRequest(f"{name} is given twice: here, and in params.{provider}", param=name)
        found[provider] = {**(said or {}), **fields}
    return found
