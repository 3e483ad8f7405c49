"""Fields of request bodies that providers declare: which ones a server has, and that each of them has one owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality
from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.plugin import BODY_CONTRACTS

if TYPE_CHECKING:
    from pegboard.core.interfaces.api_router import ApiRouter
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.plugin import BodyField
    from pegboard.core.registry.records import ProviderRecord
    from pegboard.core.registry.registry import Registry

Records = Sequence["ProviderRecord"]


def declaring(candidates: Mapping[str, Records]) -> Records:
    """Return the providers with declared fields that are certain to be chosen: what is named, or the only one left."""
    found: list[ProviderRecord] = []
    for contract in BODY_CONTRACTS:
        records = candidates.get(contract, ())
        if len(records) == 1 or CONTRACTS[contract].cardinality is Cardinality.MANY:
            found += [record for record in records if record.provider.body]
    return found


def shared_fields(records: Records) -> Iterator[Problem]:
    """Yield a problem for each field that two providers of one config declare."""
    owners: dict[str, ProviderRecord] = {}
    for record in records:
        for field in record.provider.body:
            owner = owners.setdefault(field.name, record)
            if owner is not record:
                text = f"{owner} and {record} both declare the field {field.name!r} of request bodies; use one of them"
                yield Problem(record.key, text)


def taken_fields(records: Records, apis: Records) -> Iterator[Problem]:
    """Yield a problem for each declared field that an API of the config has itself. May import these APIs."""
    known = {api.name: _own_fields(api) for api in apis} if records else {}
    for record in records:
        for field in record.provider.body:
            owners = " and ".join(f"the API {api}" for api, own in known.items() if field.name in own)
            if owners:
                text = f"{record} declares the field {field.name!r} of request bodies, which belongs to {owners}"
                yield Problem(record.key, f"{text}; leave one of them out")


def _own_fields(api: ProviderRecord) -> frozenset[str]:
    cls: type[ApiRouter[Options]] = api.load()
    with api.told("own_fields()"):
        return cls.own_fields()


def body_fields(
    registry: Registry, chosen: Mapping[str, Sequence[str]], apis: Records
) -> Mapping[str, Sequence[BodyField]]:
    """Return the fields that an engine's providers declare, by the providers' names: `chosen` are those, by contract.
    Raises ConfigError for a field with two owners; `apis` are those of the config.
    """
    names = [(contract, name) for contract in BODY_CONTRACTS for name in chosen.get(contract, ())]
    found = [one for one in (registry.get(*pair) for pair in names) if one is not None and one.provider.body]
    problems = [*shared_fields(found), *taken_fields(found, apis)]
    if problems:
        raise ConfigError(problems)
    fields: dict[str, Sequence[BodyField]] = {}
    for one in found:
        fields[one.name] = (*fields.get(one.name, ()), *one.provider.body)
    return fields
