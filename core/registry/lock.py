"""The plugin lock: which plugins an engine was composed from, so that every process of it loads exactly those."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.registry.discovery import LoadedPlugin


@dataclass(frozen=True, slots=True)
class LockEntry:
    """One plugin: its name and version, its distribution's, and a digest of its whole record."""

    name: str
    version: str
    distribution: str
    distribution_version: str
    record: str

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.distribution} {self.distribution_version})"


@dataclass(frozen=True, slots=True)
class PluginLock:
    """Plugins in the order in which their hooks are called. `digest` covers names, versions, records and order."""

    entries: tuple[LockEntry, ...]

    @classmethod
    def of(cls, plugins: Iterable[LoadedPlugin]) -> PluginLock:
        return cls(tuple(_entry(loaded) for loaded in plugins))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @property
    def digest(self) -> str:
        return _sha256(json.dumps([asdict(entry) for entry in self.entries], sort_keys=True))

    def to_dict(self) -> dict[str, object]:
        return {"digest": self.digest, "plugins": [asdict(entry) for entry in self.entries]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PluginLock:
        """Read a lock. Raises PluginError where the digest does not belong to the entries."""
        try:
            lock = cls(tuple(LockEntry(**entry) for entry in data["plugins"]))
            digest = data["digest"]
        except (KeyError, TypeError) as error:
            raise PluginError(f"not a plugin lock: {error}") from error
        if lock.digest != digest:
            raise PluginError("the plugin lock was altered: its digest does not belong to its plugins")
        return lock

    def verify(self, found: PluginLock) -> None:
        """Raise PluginError, naming each difference, unless `found` is this very lock."""
        if found.digest == self.digest:
            return
        theirs = {entry.name: entry for entry in found.entries}
        differences = []
        for entry in self.entries:
            other = theirs.pop(entry.name, None)
            if other is None:
                differences.append(f"{entry} is missing here")
            elif other != entry:
                same = str(other) == str(entry)
                differences.append(f"the record of {entry} differs" if same else f"{entry} is locked, {other} is here")
        differences += [f"{entry} is not in the lock" for entry in theirs.values()]
        raise PluginError(f"the plugins differ from the plugin lock: {'; '.join(differences) or 'another order'}")


def _entry(loaded: LoadedPlugin) -> LockEntry:
    plugin, origin = loaded.plugin, loaded.origin
    return LockEntry(plugin.name, plugin.version, origin.distribution, origin.version, _digest_record(loaded))


def _digest_record(loaded: LoadedPlugin) -> str:
    plain = asdict(loaded.plugin)
    for provider in plain["providers"]:
        provider["provides"] = sorted(provider["provides"])
        del provider["conformance"]  # says how it is tested, which changes nothing of what runs
    for contract in plain["contracts"]:
        del contract["suite"]
    return _sha256(json.dumps(plain, sort_keys=True, default=_plain))


def _plain(value: object) -> object:
    """Return what JSON knows in place of what it does not: of a mapping, or of a type of fields."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
