"""The adapters of an engine: which there are, in which state, and how many requests use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.adapters.messages import Drop, Load, Loaded, Poll, Work

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

State = Literal["loading", "ready", "leaving", "failed", "gone"]

_REMEMBERED = 256
"""How many adapters that have failed or are gone `state` still knows."""
_TOTALS = 1024
"""Names of which totals are kept, beside those that requests may have: the others have been used longest ago."""


@dataclass(slots=True)
class Totals:
    """Of the requests for a name that have ended, whichever adapter it meant, and of those `refused` because of it."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(slots=True, eq=False)
class Adapter:
    """One load of an adapter. `users` counts the requests that have it, wherever they are; `slot` is where it is on
    the device, 0: nowhere, and `holders` are the requests in batches, by rid. It is `kept` on the host, or being read;
    one that no request uses may be neither.
    """

    uid: int
    name: str
    path: str
    pinned: bool = False
    state: State = "loading"
    error: str = ""
    digest: str = ""
    rank: int = 0
    nbytes: int = 0
    users: int = 0
    slot: int = 0
    holders: dict[str, Req] = field(default_factory=dict)
    used: int = 0
    """When a request was last given its slot, as a count of such events."""
    kept: bool = False
    pending: bool = True
    """Whether it is being read."""
    asked: int = 0
    """When it was loaded, or a request last asked for it, as a count of such events."""

    def shown(self) -> dict[str, object]:
        """Return what operators are told."""
        return {
            "uid": self.uid,
            "name": self.name,
            "path": self.path,
            "state": self.state,
            "pinned": self.pinned,
            "rank": self.rank,
            "bytes": self.nbytes,
            "users": self.users,
            "kept": self.kept,
            "error": self.error,
        }


class AdapterStore:
    """`ask` has work done where batches run, between two of them. A name means the newest load under it that has ended
    well; an older one leaves when its last request has ended.
    """

    def __init__(self, preload: Mapping[str, str], host_bytes: int, max_pinned: int) -> None:
        self.names: dict[str, Adapter] = {}
        """Those that new requests may have."""
        self._host_bytes = host_bytes
        self._max_pinned = max_pinned
        self._all: dict[int, Adapter] = {}
        self._past: dict[int, Adapter] = {}
        self._dropped: list[int] = []
        self._next = 1
        self._asked = 0
        self.totals: dict[str, Totals] = {}
        """By name, the one used last at the end."""
        self.evictions = 0
        """How often an adapter was let go of for want of memory."""
        self.ask: Callable[[Work], object] = _not_yet
        self.ended: Callable[[Adapter], None] = lambda adapter: None
        """Is called with each adapter that is gone, or has failed."""
        for name, path in preload.items():
            self._add(name, path)

    @property
    def loaded(self) -> Iterable[Adapter]:
        """All that take memory, or are about to."""
        return self._all.values()

    @property
    def loading(self) -> bool:
        """Whether some load has not ended; its adapter may have been unloaded meanwhile."""
        return any(adapter.pending for adapter in self._all.values())

    @property
    def failed(self) -> Sequence[Adapter]:
        """The last of those whose load has failed."""
        return [adapter for adapter in self._past.values() if adapter.state == "failed"]

    def totals_of(self, name: str) -> Totals:
        """Return the totals of a name, which outlive its adapters."""
        found = self.totals[name] = self.totals.pop(name, Totals())
        if len(self.totals) > _TOTALS + len(self.names):
            del self.totals[next(kept for kept in self.totals if kept not in self.names)]
        return found

    def _add(self, name: str, path: str, *, pinned: bool = False) -> Adapter:
        made = self._all[self._next] = Adapter(self._next, name, path, pinned)
        self.names.setdefault(name, made)
        self._next += 1
        self._note(made)
        return made

    def _note(self, adapter: Adapter) -> None:
        self._asked += 1
        adapter.asked = self._asked

    # ---- what operators do -----------------------------------------------------------------------------------------

    def load(self, name: str, path: str, *, pinned: bool = False, replace: bool = False) -> Adapter:
        """Begin to load an adapter. One that it is to replace keeps the name until it is loaded. Raises InvalidRequest
        where the name is taken, or too many would be pinned.
        """
        old = self.names.get(name)
        if old is not None and not replace:
            raise InvalidRequest(
                f"the adapter {name!r} is {old.state} already; unload it first, or set `replace`",
                param="lora_name",
                code="adapter_exists",
                status=409,
            )
        if pinned and sum(one.pinned for one in self._all.values() if one is not old) >= self._max_pinned:
            raise InvalidRequest(f"adapters.slots allows {self._max_pinned} pinned adapters at most", param="pinned")
        self.ask(Load(self._next, path))
        return self._add(name, path, pinned=pinned)

    def unload(self, name: str, *, leaving: bool = False) -> Adapter:
        """Refuse new requests for an adapter; it is gone when the last one has ended. Raises InvalidRequest. With
        `leaving` one that has been unloaded and still has requests is found, too.
        """
        left = next((adapter for adapter in self.named(name) if adapter.state == "leaving"), None)
        found = self.names.get(name) or (left if leaving else None) or self.find(name)
        self.names.pop(name, None)
        for adapter in self.named(name):
            if adapter.state != "leaving":
                self._leave(adapter)  # what was to replace it, too
        return found

    def named(self, name: str) -> Sequence[Adapter]:
        """Return all adapters of a name: what it means, what is to replace that, and what is leaving."""
        return [adapter for adapter in self._all.values() if adapter.name == name]

    def state(self, uid: int) -> Adapter:
        """Return the newest state of a load. Raises InvalidRequest for a number that is not known."""
        self.refresh()
        found = self._all.get(uid) or self._past.get(uid)
        if found is None:
            raise InvalidRequest(f"there is no load {uid}", param="uid", status=404)
        return found

    def refresh(self) -> None:
        """Take what has been loaded since, let go of what no request uses any more, and read again what some do."""
        if self.loading:
            found = self.ask(Poll())
            assert isinstance(found, list)
            for loaded in found:
                self._take(loaded)
        wanted = [adapter for adapter in self._all.values() if adapter.users and not (adapter.kept or adapter.pending)]
        again = [adapter for adapter in wanted if self._fits(adapter)]
        if self._dropped:
            dropped, self._dropped = tuple(self._dropped), []
            self.ask(Drop(dropped))
        for adapter in again:
            self.ask(Load(adapter.uid, adapter.path, adapter.digest))

    @property
    def stale(self) -> bool:
        """Whether `refresh` would let go of something."""
        return bool(self._dropped)

    @property
    def host_bytes(self) -> int:
        """What adapters take on the host, those included that are read again."""
        return sum(adapter.nbytes for adapter in self._all.values() if adapter.kept or adapter.pending)

    def _fits(self, adapter: Adapter) -> bool:
        """Make room for an adapter that was read before, and count it as pending. False where others have it all."""
        if not self._evicted(self.host_bytes + adapter.nbytes):
            return False
        adapter.pending = True
        return True

    def _evicted(self, taken: int) -> bool:
        """Let go of adapters that no request uses, the one longest unasked first, until `taken` bytes fit. False, and
        nothing is let go of, where that is not enough.
        """
        idle = [adapter for adapter in self._all.values() if adapter.kept and not (adapter.users or adapter.pinned)]
        chosen = []
        for adapter in sorted(idle, key=lambda adapter: adapter.asked):
            if taken <= self._host_bytes:
                break
            chosen.append(adapter)
            taken -= adapter.nbytes
        if taken > self._host_bytes:
            return False
        for adapter in chosen:
            adapter.kept = False
            self.ended(adapter)
            self._dropped.append(adapter.uid)
        self.evictions += len(chosen)
        return True

    def _take(self, loaded: Loaded) -> None:
        adapter = self._all[loaded.uid]
        adapter.digest, adapter.rank, adapter.nbytes = loaded.digest, loaded.rank, loaded.nbytes
        adapter.error = loaded.error
        taken = self.host_bytes
        adapter.pending = False
        if not loaded.error and not self._evicted(taken):
            adapter.error = (
                f"no memory for {adapter.path}: it takes {adapter.nbytes} bytes, of adapters.host_bytes "
                f"{self._host_bytes - taken + adapter.nbytes} are left, beside adapters that are in use or pinned"
            )
        adapter.kept = not adapter.error
        if adapter.error:
            if self.names.get(adapter.name) is adapter:
                del self.names[adapter.name]
            self._end(adapter, "failed")
        elif adapter.state == "leaving":
            self._end_unused(adapter)
        else:
            adapter.state = "ready"
            self._name(adapter)

    def _name(self, adapter: Adapter) -> None:
        """Give an adapter its name, unless a newer one has it; who had it leaves."""
        old = self.names.get(adapter.name, adapter)
        older, newer = sorted((old, adapter), key=lambda one: one.uid)
        self.names[adapter.name] = newer
        if older is not newer:
            self._leave(older)

    def _leave(self, adapter: Adapter) -> None:
        adapter.state, adapter.pinned = "leaving", False
        self._end_unused(adapter)

    def _end_unused(self, adapter: Adapter) -> None:
        if not (adapter.users or adapter.pending):
            self._end(adapter, "gone")

    def _end(self, adapter: Adapter, state: State) -> None:
        adapter.state, adapter.kept = state, False
        del self._all[adapter.uid]
        self.ended(adapter)
        self._dropped.append(adapter.uid)
        self._past[adapter.uid] = adapter
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]

    # ---- what requests do ------------------------------------------------------------------------------------------

    def find(self, name: str) -> Adapter:
        """Return the adapter that a name means now. Raises InvalidRequest (404)."""
        found = self.names.get(name)
        if found is None:
            known = ", ".join(map(repr, self.names)) or "none"
            raise InvalidRequest(
                f"there is no adapter {name[:256]!r}; this server has {known}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return found

    def use(self, name: str) -> Adapter:
        """Count a request. Raises InvalidRequest (404)."""
        found = self.find(name)
        found.users += 1
        self._note(found)
        return found

    def unuse(self, adapter: Adapter) -> None:
        """Count the end of a request."""
        adapter.users -= 1
        if adapter.state == "leaving":
            self._end_unused(adapter)


def _not_yet(work: Work) -> object:
    raise RuntimeError("adapters cannot be loaded before there is a scheduler")
