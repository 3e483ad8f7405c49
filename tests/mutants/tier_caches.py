"""Caches with tiers, each with one bug. Their own self-check is switched off."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from unittest import mock

from pegboard.core.interfaces.keys import PrefixKey
from pegboard.plugins.cache_hiradix import writing
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from pegboard.plugins.cache_hiradix.handle import TierHandle
from pegboard.plugins.cache_hiradix.prefetching import Fetch
from pegboard.plugins.kv_tiers.api import NAME, Job, PageLoad, tiers_of
from pegboard.plugins.kv_tiers.api import Tiers as Lent
from pegboard.toolkit.cache.block_keys import BlockKeys


class Tiers(HiRadixCache):
    def check(self):
        pass


class UnpinsAtLaunch(Tiers):
    """Takes a load for done once it was begun."""

    def load(self, handle, slots):
        load = super().load(handle, slots)
        self._tree.unpin(load.host)
        return load

    def loaded(self, load, ok):
        self._tree.host.pins[load.host] += 1
        super().loaded(load, ok)


class NoEpoch(Tiers):
    """Does not notice that a page was evicted while it was copied."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        cut = self._tree.cut_device

        def cut_device(node, keep):
            pages = cut(node, keep)
            self._tree.epoch[pages] -= 1
            return pages

        setattr(self._tree, "cut_device", cut_device)  # noqa: B010


class FindsWhatIsOnItsWay(Tiers):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        setattr(self._tree, "ready", lambda entry: entry.host.size)  # noqa: B010


class LocksNoTails(Tiers):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        lock_tail = self._tree.lock_tail

        def count(nodes, by):
            lock_tail(nodes, by)
            for node in nodes:
                node.data.tails = 0
                self._tree.settle(node.data)

        setattr(self._tree, "lock_tail", count)  # noqa: B010


class UnlocksAllTails(Tiers):
    """Lets go of the host's part with the first of several locks."""

    def unlock(self, handle):
        tail = handle.tail_nodes()
        super().unlock(handle)
        for node in tail:
            node.data.tails = 0
            self._tree.settle(node.data)


class GivesPagesOfRunningJobs(Tiers):
    """Takes a job for over once it was cancelled."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        if self._writing is not None:
            setattr(self._writing.leftovers, "leave", lambda job, pages: self._tree.unpin(pages))  # noqa: B010


@dataclass
class _Believed:
    """A job with another result than it has."""

    job: Job
    size: int

    @property
    def done(self):
        return self.job.done

    error = ""

    @property
    def result(self):
        return self.size


class _Believing:
    """A mover with jobs of some kinds that always do everything."""

    def __init__(self, mover, *kinds):
        self._mover = mover
        self._kinds = kinds

    def __getattr__(self, name):
        method = getattr(self._mover, name)
        if name not in self._kinds:
            return method
        return lambda one, *rest: _Believed(method(one, *rest), len(one))

    def cancel(self, job):
        self._mover.cancel(getattr(job, "job", job))

    def wait(self, jobs, timeout):
        return self._mover.wait([getattr(job, "job", job) for job in jobs], timeout)


def _believing(ctx, kind):
    tiers = tiers_of(ctx)
    if tiers is None:
        return ctx
    return replace(ctx, services={NAME: Lent(_Believing(tiers.mover, kind), tiers.identity)})


class BelievesCopies(Tiers):
    def __init__(self, options, ctx):
        super().__init__(options, _believing(ctx, "save"))


class BelievesBlocks(Tiers):
    def __init__(self, options, ctx):
        super().__init__(options, _believing(ctx, "fetch"))


class FetchesWithoutAsking(Tiers):
    def __init__(self, options, ctx):
        super().__init__(options, _believing(ctx, "find"))


class LoadsInTheWrongOrder(Tiers):
    def load(self, handle, slots):
        load = super().load(handle, slots)
        return PageLoad(load.ticket, load.device, load.host[::-1].copy())


class EvictionWaits(Tiers):
    """Gives no page back while anything is being copied."""

    def evict(self, num_tokens):
        return 0 if self._writing is not None and len(self._writing.saver) else super().evict(num_tokens)


class MiscountsOrigins(Tiers):
    """Counts what a storage has brought twice."""

    def match(self, key):
        found = super().match(key)
        return replace(found, promised_from={"host": found.promised, "storage": found.promised})


class NamesOtherOrigins(Tiers):
    """Says that tokens come from where it does not say that any do."""

    def match(self, key):
        found = super().match(key)
        return replace(found, promised_from={"moon": found.promised})


class NamesNoLoader(Tiers):
    loader = ""


class NeverLoading(Tiers):
    def match(self, key):
        return replace(super().match(key), arriving=False)


class LoadsAreNoNews(Tiers):
    def load(self, handle, slots):
        version = self.version
        load = super().load(handle, slots)
        self.version = version
        return load


class LoadsWhatIsNotLocked(Tiers):
    def load(self, handle, slots):
        handle.locks += 1
        try:
            return super().load(handle, slots)
        finally:
            handle.locks -= 1


class LoadsWhatFits(Tiers):
    def load(self, handle, slots):
        return super().load(handle, slots[: handle.end - handle.length])


class EndsTwice(Tiers):
    def loaded(self, load, ok):
        with contextlib.suppress(ValueError):
            super().loaded(load, ok)


class FailedLoadsForget(Tiers):
    """Gives up what could not be loaded."""

    def loaded(self, load, ok):
        super().loaded(load, ok)
        if not ok:
            self._tree.host.state[load.host] = 1
            self._tree.host.pins[load.host] += 1
            for entry in self._tree.entries.values():
                entry.pins = int(self._tree.host.pins[entry.host].sum())


class EndsNoLoads(Tiers):
    """Goes on to pin what was loaded."""

    def loaded(self, load, ok):
        pass


class CountsTheDeviceAlone(Tiers):
    def matched_length(self, key):
        return len(self.match(key))


class ResetKeepsTheHost(Tiers):
    def reset(self):
        if self._tree.locked_pages or self._tree.tails_locked:
            raise RuntimeError("something is locked")
        self.evict(self.evictable_tokens)


class ResetsUnderALockedTail(Tiers):
    def reset(self):
        self._tree.tails_locked = 0
        super().reset()


class NeverCloses(Tiers):
    def close(self):
        pass


class FindsNothingOnTheHost(Tiers):
    def match(self, key):
        found = super().match(key)
        assert isinstance(found.handle, TierHandle)
        found.handle.tail, found.handle.end = None, len(found)
        return replace(found, promised=0, promised_from={})


class WantsHostPages(Tiers):
    """Cannot do without a host tier."""

    def insert(self, key, slots, *, priority=0):
        assert self._writing is not None
        return super().insert(key, slots, priority=priority)


class _NoNamespace(BlockKeys):
    def of(self, key, stop, start=0):
        return super().of(PrefixKey(key.tokens), stop, start)


class StoresWithoutNamespaces(Tiers):
    def __init__(self, options, ctx):
        with mock.patch.object(writing, "BlockKeys", _NoNamespace):
            super().__init__(options, ctx)


class _Forgetful(dict[bytes, object]):
    def __setitem__(self, key, value):
        pass

    def setdefault(self, key, value=None):
        return value


class FetchesTwice(Tiers):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        if self._writing is not None:
            setattr(self._writing.prefetcher, "_claims", _Forgetful())  # noqa: B010


class _Endless:
    def __init__(self, prefetch):
        self._prefetch = prefetch

    def __getattr__(self, name):
        return getattr(self._prefetch, name)

    def close(self):
        pass


class PrefetchesForEver(Tiers):
    def prefetch(self, key):
        return _Endless(super().prefetch(key))


class WaitsWithoutStorages(Tiers):
    def prefetch(self, key):
        prefetch = super().prefetch(key)
        assert isinstance(prefetch, Fetch)
        prefetch.done = False
        return prefetch


class BroughtForEver(Tiers):
    def loaded(self, load, ok):
        brought = self._tree.host.brought[load.host].copy()
        super().loaded(load, ok)
        self._tree.host.brought[load.host] = brought
