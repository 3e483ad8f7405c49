"""Control actions: load, unload, look."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.plugins.adapters.stage import Adapters

T = TypeVar("T", str, bool, int)


class Controls:
    """The actions `load_adapter`, `unload_adapter`, `adapter_state` and `list_adapters`. The first two begin what
    `adapter_state` then follows, by the `uid` that they answer.
    """

    def __init__(self, stage: Adapters) -> None:
        self._stage = stage
        self._store = stage.store

    def add_to(self, engine: EngineView) -> None:
        engine.add_control("load_adapter", self.load)
        engine.add_control("unload_adapter", self.unload)
        engine.add_control("adapter_state", self.state)
        engine.add_control("list_adapters", self.list)

    def load(self, args: dict[str, object]) -> dict[str, object]:
        """Begin to load the adapter in `path` under `name`; `pinned`, `replace`."""
        name, path = _of(args, "name", ""), _of(args, "path", "")
        pinned, replace = _of(args, "pinned", False), _of(args, "replace", False)
        return self._store.load(name, path, pinned=pinned, replace=replace).shown()

    def unload(self, args: dict[str, object]) -> dict[str, object]:
        """Take the adapter `name` from new requests; with `force` end those that have it, too."""
        return self._stage.unload(_of(args, "name", ""), force=_of(args, "force", False)).shown()

    def state(self, args: dict[str, object]) -> dict[str, object]:
        """Tell how far a load with this `uid` is."""
        return self._store.state(_of(args, "uid", 0)).shown()

    def list(self, args: dict[str, object]) -> dict[str, object]:
        """Tell of all adapters that new requests may have."""
        return {"adapters": [adapter.shown() for adapter in self._store.names.values()]}


def _of(args: dict[str, object], name: str, otherwise: T) -> T:
    value = args.get(name, otherwise)
    if type(value) is not type(otherwise):
        raise InvalidRequest(f"{name} must be {type(otherwise).__name__}, got {value!r:.100}", param=name)
    return value
