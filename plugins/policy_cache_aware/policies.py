"""Schedule policies that ask the prefix cache how much of each waiting prompt it holds."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.plugins.policy_cache_aware.options import CacheAwareOptions, DfsWeightOptions, LpmOptions
from pegboard.plugins.policy_cache_aware.tree import PrefixTree

CacheAwareT = TypeVar("CacheAwareT", bound=CacheAwareOptions)


@dataclass(slots=True)
class _Match:
    """How many tokens the cache held at `version` of a request that was `seq_len` tokens long. `stem` names the group
    of requests that begin alike.
    """

    seq_len: int
    version: int = -1
    length: int = 0
    stem: tuple[str, bytes] | None = None


class _CacheAwarePolicy(SchedulePolicy[CacheAwareT]):
    """Falls back to the queue as it stands when it is long, and remembers what it asked and answered.

    A newcomer is matched once. After that a match is asked for again only once the cache's version or the request has
    changed, and for at most `rematch_limit` requests per step: first for those whose last match was too short to count,
    and with a quarter of them at least for those that were not asked for the longest. So a step costs about the same
    however long the queue is, and a match is at most ``4 * waiting / rematch_limit`` steps behind; it decides the order
    alone, since a request is matched again when it is admitted.
    """

    def __init__(self, options: CacheAwareT, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self._known: dict[Req, _Match] = {}
        """Of those that waited at the last call."""
        self._question: tuple[int, list[Req]] | None = None
        self._answer: list[int] = []
        self._steps = 0
        self._fallbacks = 0

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        limit = self.options.fallback_above
        self._steps += 1
        if len(waiting) < 2 or (limit and len(waiting) > limit):
            self._fallbacks += len(waiting) >= 2
            self._forget()
            return list(waiting)
        matches, complete = self._match(waiting)
        question = (self.ctx.cache.version, list(waiting))
        if question != self._question:
            self._answer = self._rank(waiting, matches)
            self._question = question if complete else None
        return [waiting[index] for index in self._answer]

    def stats(self) -> dict[str, float]:
        return {"steps": self._steps, "fallback_steps": self._fallbacks}

    def _forget(self) -> None:
        """Let go of the queue of an earlier call: its requests hold their tokens."""
        if self._known:
            self._known, self._question, self._answer = {}, None, []

    def _match(self, waiting: Sequence[Req]) -> tuple[list[_Match], bool]:
        """Return the match of each, brought up to date for as many as one step allows, and whether that is all of
        them.
        """
        cache, version, known = self.ctx.cache, self.ctx.cache.version, self._known
        lengths = [len(req.tokens) for req in waiting]
        found = [known.get(req) for req in waiting]
        matches = [
            _Match(length) if match is None or match.seq_len != length else match
            for match, length in zip(found, lengths, strict=True)
        ]
        versions = np.fromiter((match.version for match in matches), np.int64, len(matches))
        due = np.flatnonzero(versions == -1).tolist()
        stale = np.flatnonzero((versions != version) & (versions != -1)).tolist()
        limit = self.options.rematch_limit
        complete = limit is None or len(stale) <= limit
        due += stale if limit is None or complete else self._chosen(stale, matches, limit)
        for index in due:
            match = matches[index]
            match.length, match.version = cache.matched_length(waiting[index].matchable_key()), version
        if due:
            self._question = None
        self._known = dict(zip(waiting, matches, strict=True))
        return matches, complete

    def _chosen(self, stale: list[int], known: Sequence[_Match], limit: int) -> list[int]:
        """Return those of too many that are matched anew in this step."""
        # A quarter is kept for the rest, so that no turn is put off for ever.
        first = [index for index in stale if self._may_grow(known[index])][: limit - max(1, limit // 4)]
        taken = set(first)
        others = [index for index in stale if index not in taken]
        others.sort(key=lambda index: known[index].version)
        return first + others[: limit - len(first)]

    def _may_grow(self, match: _Match) -> bool:
        """Return whether a request with this match is worth another look before others."""
        return match.length == 0

    @abc.abstractmethod
    def _rank(self, waiting: Sequence[Req], known: Sequence[_Match]) -> list[int]:
        """Return indices into `waiting`, most urgent first; `known` are the cached tokens of each."""


class LpmPolicy(_CacheAwarePolicy[LpmOptions]):
    """Longest cached prefix first (SGLang's `lpm`).

    Of waiting requests that share a prefix which is not cached yet, all but the first go after the others: once the
    first has run, they find it in the cache.
    """

    def _may_grow(self, match: _Match) -> bool:
        return match.length <= self.options.in_batch_check_threshold

    def _rank(self, waiting: Sequence[Req], known: Sequence[_Match]) -> list[int]:
        keys = np.fromiter((-match.length for match in known), np.int64, len(known))
        check = self.options.in_batch_check_threshold
        stems: set[tuple[str, bytes]] = set()
        for index in np.flatnonzero(keys >= -check).tolist():
            stem = known[index].stem or self._stem(waiting[index], known[index])
            if stem is None:
                continue
            if stem in stems:
                keys[index] = 1
            stems.add(stem)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order

    def _stem(self, req: Req, match: _Match) -> tuple[str, bytes] | None:
        """Return what a request shares with others of its group; None where it is too short to share enough."""
        shared = self.options.in_batch_deprioritize_threshold
        key = req.matchable_key()
        if len(key) < shared:
            return None
        match.stem = (key.namespace, key.tokens[:shared].tobytes())
        return match.stem


class DfsWeightPolicy(_CacheAwarePolicy[DfsWeightOptions]):
    """Depth first through the tree of cached prefixes that the queue matches, heaviest branch first (SGLang's
    `dfs-weight`), so that requests which share a prefix run while it is in the cache.

    A branch weighs as many requests as wait below it. The cache's own tree is opaque, so the tree is built from the
    matched prefixes themselves; where no two of them part, a node of the cache changes nothing about the order.
    Requests that end at a node come after those below it, as in SGLang; requests without a match come last.
    """

    def __init__(self, options: DfsWeightOptions, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self._tree = PrefixTree(ctx.cache.page_size)

    def _forget(self) -> None:
        super()._forget()
        self._tree.place((), ())

    def _rank(self, waiting: Sequence[Req], known: Sequence[_Match]) -> list[int]:
        self._tree.place(waiting, [match.length for match in known])
        return self._tree.depth_first(waiting)
