"""From what `use` says to provider records, through the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pegboard.core.config.merge import Merged
from pegboard.core.config.section import AUTO
from pegboard.core.config.shape import use_path
from pegboard.core.config.sources import is_preset
from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.errors import Problem
from pegboard.core.registry.records import ProviderRecord
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.text.near_names import did_you_mean


@dataclass
class Resolution:
    """`candidates` per contract in the order to try (or, for a list, to call); one whose `use` is wrong is absent.

    `named` are the contracts whose provider the config names itself.
    """

    candidates: dict[str, tuple[ProviderRecord, ...]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def resolve(merged: Merged, registry: Registry) -> Resolution:
    """Look up every `use`; what is wrong with one becomes a problem and does not hide what is wrong with the next."""
    out = Resolution()
    for path, contract in merged.shape.uses.items():
        section = merged.get(path, {})
        if isinstance(section, Mapping):
            _resolve_one(section.get("use", AUTO), contract, merged, registry, out)
    for path, contract in merged.shape.lists.items():
        _resolve_list(merged.get(path, []), contract, merged, registry, out)
    return out


def entry_name(entry: object) -> object:
    """Return the name in a list entry, which reads ``name`` or ``{use: name, option: value}``."""
    return entry.get("use") if isinstance(entry, Mapping) else entry


def _resolve_one(name: object, contract: Contract, merged: Merged, registry: Registry, out: Resolution) -> None:
    path = use_path(contract)
    if name == AUTO:
        found = tuple(one for one in registry.providers(contract.name) if not one.problem and one.provider.rank >= 0)
        if found or contract.optional:
            out.candidates[contract.name] = found
        else:
            message = f"no {contract.name} can be chosen automatically; installed: {installed(contract, registry)}"
            out.problems.append(Problem(path, message, merged.origin(path)))
        return
    record = _look_up(name, contract, path, merged, registry, out)
    if record:
        out.candidates[contract.name] = (record,)
        out.named.add(contract.name)


def _resolve_list(entries: object, contract: Contract, merged: Merged, registry: Registry, out: Resolution) -> None:
    path = contract.config_path
    if not isinstance(entries, list):
        message = f"{entries!r} must be a list of names, or of {{use: name, option: value}}"
        out.problems.append(Problem(path, message, merged.origin(path)))
        return
    found: list[ProviderRecord] = []
    failed = False
    for index, entry in enumerate(entries):
        place = f"{path}[{index}]" + (".use" if isinstance(entry, Mapping) else "")
        record = _look_up(entry_name(entry), contract, place, merged, registry, out)
        failed |= record is None
        if record in found:
            failed = True
            out.problems.append(Problem(place, f"{entry_name(entry)!r} stands in the list twice", merged.origin(place)))
        elif record:
            found.append(record)
    if not failed:
        out.candidates[contract.name] = tuple(found)
        out.named.add(contract.name)


def _look_up(
    name: object, contract: Contract, path: str, merged: Merged, registry: Registry, out: Resolution
) -> ProviderRecord | None:
    record = registry.get(contract.name, name) if isinstance(name, str) else None
    clash = registry.clash(contract.name, record.name) if record is not None else ""
    if clash and is_preset(merged.origin(path)):
        clash = ""  # presets mean the built-in one; what an operator means is not known
    if record is not None and not record.problem and not clash:
        return record
    if clash:
        message = clash
    elif record is not None:
        message = f"{record.name!r} of plugin {record.plugin.name!r} ({record.origin}) cannot be used: {record.problem}"
    elif isinstance(name, bool):
        message = f"YAML read {'yes, on or true' if name else 'no, off or false'} here; put the name in quotes"
    elif not isinstance(name, str) or not name:
        message = f"{name!r} must be the name of a provider; installed: {installed(contract, registry)}"
    else:
        message = _unknown(name, contract, registry)
    out.problems.append(Problem(path, message, merged.origin(path)))
    return None


def _unknown(name: str, contract: Contract, registry: Registry) -> str:
    names = [record.name for record in registry.providers(contract.name)]
    if contract.cardinality is not Cardinality.MANY:
        names.append(AUTO)
    parts = [f"{name!r} is not installed", did_you_mean(name, names), f"installed: {installed(contract, registry)}"]
    if plugin := registry.plugin(name):
        own = [one.name for one in plugin.plugin.providers if one.contract == contract.name]
        parts.append(f"{name!r} is a plugin; its {contract.name} providers are: {', '.join(own) or 'none'}")
    elif others := [f"{record.provider.contract} ({use_path(record.contract)})" for record in registry.find(name)]:
        parts.append(f"there is one of that name for {', '.join(others)}")
    if registry.disabled:
        parts.append(f"plugins.disable leaves out: {', '.join(left_out.name for left_out in registry.disabled)}")
    parts += [f"plugin {broken}" for broken in registry.broken]
    parts += registry.name_conflicts
    return "; ".join(part for part in parts if part).replace("?; ", "? ")


def installed(contract: Contract, registry: Registry) -> str:
    return ", ".join(str(record) for record in registry.providers(contract.name)) or "none"
