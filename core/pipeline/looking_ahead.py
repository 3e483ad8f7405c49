"""TokensAhead: what stages bring ahead of requests is cut to what memory and constraints allow."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.constraint import constraint_of
from pegboard.core.interfaces.req import SINGLE
from pegboard.core.interfaces.trees import MAX_NODES
from pegboard.core.pipeline.ahead import Ahead, Room
from pegboard.core.pipeline.flags import ALONE, CONSTRAINED
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.constraint import NodeMasks
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.core.pipeline.components import Components
    from pegboard.core.pipeline.running import RunningBatch

logger = logging.getLogger(__name__)


class TokensAhead:
    """Plans tokens ahead of running requests. All calls come from the scheduler's loop."""

    def __init__(self, components: Components) -> None:
        self._points = components.points
        self._memory = components.memory
        self._executor = components.executor
        self._vocab_size = components.builder.vocab_size
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return the seconds that planning them has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def plan(self, running: RunningBatch) -> Ahead | None:
        """Return trees for all running requests that compute one token, with slots for them; None where no request has
        tokens ahead. No step may be under way.
        """
        if not self._points.looking_ahead:
            return None
        places = running.decoding()
        most = self._most(running, places)
        if not (most > 1).any():
            return None
        reqs = [running.reqs[place] for place in places.tolist()]
        self._points.bound_ahead(reqs, running.flags[places], most)
        room = Room(
            running, self._memory, self._executor, places, most, reqs, running.rows[places], running.known_lens[places],
            running.last[places], running.flags[places],
        )  # fmt: skip
        since = time.perf_counter()
        found = self._points.ahead(room, self._vocab_size)
        brought = time.perf_counter()
        self._seconds += brought - since
        if found is None:
            return None
        stage, trees = found
        masks, trees = _follow_constraints(room, trees, -(-self._vocab_size // 32))
        trees, masks = _find_room(room, trees, masks)
        seconds = time.perf_counter() - brought
        self._seconds += seconds
        self._points.ahead_cut(stage, seconds)
        return Ahead(trees, tuple(masks)) if (trees.counts > 1).any() else None

    def _most(self, running: RunningBatch, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of the requests at `places` how many nodes its tree may have."""
        width = self._memory.rows.width - running.known_lens[places] + 1
        most = np.minimum(np.minimum(width, running.left[places]), MAX_NODES)
        flags = running.flags[places]
        most[flags & (SINGLE | ALONE) != 0] = 1
        for index in np.flatnonzero((flags & CONSTRAINED != 0) & (most > 1)).tolist():
            if not _looks_at(running, int(places[index]), 2):
                most[index] = 1
        return most


def _looks_at(running: RunningBatch, place: int, nodes: int) -> bool:
    """Return whether the constraint of the request at `place`, if any, can look at a tree of so many nodes now."""
    req = running.reqs[place]
    constraint = constraint_of(req)
    try:
        return constraint is None or constraint.room(nodes)
    except Exception:
        logger.exception("the constraint of %s does not say whether it can look ahead", quoted(req.name))
        _leave_alone(running, place)
        return False


def _leave_alone(running: RunningBatch, place: int) -> None:
    """Let the request at a place have no tokens ahead from now on."""
    running.reqs[place].flags |= ALONE
    running.flags[place] |= ALONE


def _follow_constraints(room: Room, trees: TokenTrees, words: int) -> tuple[list[NodeMasks | None], TokenTrees]:
    """Cut the tokens that constraints forbid, and find out what they allow after the others, in masks of `words`."""
    masks: list[NodeMasks | None] = [None] * len(room.reqs)
    if not room.batch.any(CONSTRAINED):
        return masks, trees
    keep = np.ones(trees.tokens.shape[0], np.bool_)
    starts = tree.starts(trees.counts)
    for index, req in enumerate(room.reqs):
        constraint, start, count = constraint_of(req), int(starts[index]), int(trees.counts[index])
        if constraint is None or count == 1:
            continue
        part = slice(start, start + count)
        keep[start + 1 : start + count] = False
        place = int(room.places[index])
        if not _looks_at(room.batch, place, count):
            continue
        try:
            own = (trees.tokens[part].tolist(), trees.parents[part].tolist())
            nodes, masked = constraint.walk(own, req.remaining_tokens)
            kept = int(nodes.sum())
            if nodes.shape != (count,) or masked.bits.shape != (kept, words) or masked.free.shape != (kept,):
                raise ValueError(f"walk() answers {nodes.shape} for {count} nodes, with masks {masked.bits.shape}")
            keep[part] = nodes
            masks[index] = masked if nodes[1:].any() else None
        except Exception:
            logger.exception("the constraint of %s cannot look ahead: it gets no tokens ahead now", quoted(req.name))
            _leave_alone(room.batch, place)
    return masks, tree.cut(trees, keep)


def _find_room(
    room: Room, trees: TokenTrees, masks: list[NodeMasks | None]
) -> tuple[TokenTrees, list[NodeMasks | None]]:
    """Get slots for the tokens, from memory that no request needs; cut those that get none."""
    counts = trees.counts
    before = room.known_lens - 1
    fits = counts.copy()
    for index in np.flatnonzero(before + counts > room.batch.allocated[room.places]).tolist():
        has = room.wish(index, int(before[index] + counts[index]))
        fits[index] = min(counts[index], has - before[index])
    if (fits == counts).all():
        return trees, masks
    for index, mask in enumerate(masks):
        if mask is not None:
            first = np.arange(mask.free.shape[0]) < fits[index]
            masks[index] = mask.keep(first) if fits[index] > 1 else None
    return tree.first_nodes(trees, fits), masks
