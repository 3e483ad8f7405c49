"""The conformance suite of token constraints: what binds the tokens of a request.

A class says how to make one; each is at the beginning, and all of them bind alike::

    class TestMyConstraint(TokenConstraintContract):
        def make(self, req: Req) -> TokenConstraint:
            return MyConstraint(req, ["red", "green"])
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pegboard.core.interfaces.constraint import LATER, NodeMasks, TokenConstraint, constrain
from pegboard.core.interfaces.req import SINGLE, Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import FinishReason
from pegboard.core.pipeline.finish import Constraints
from pegboard.core.pipeline.points import Points

if TYPE_CHECKING:
    from numpy.typing import NDArray

PATIENCE = 20.0
SEEDS = range(8)
LONGEST = 24
PROMPT = [1, 2, 3]


class TokenConstraintContract:
    """A constraint says what may come, goes on by it, and looks at what is only proposed without going on."""

    def make(self, req: Req) -> TokenConstraint:
        """Return the constraint of a new request, with room for trees. Override."""
        raise NotImplementedError("say how to make the constraint: override make")

    # ---- the tests -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", SEEDS)
    def test_what_may_come_is_taken(self, seed: int) -> None:
        for req, constraint, token in self.walk_along(seed):
            assert token in allowed(constraint)
            reason = take(req, constraint, token)
            assert not failed(reason), f"its mask allows {token}, and advance() fails: {reason}"

    @pytest.mark.parametrize("seed", SEEDS)
    def test_it_forces_nothing_that_may_not_come(self, seed: int) -> None:
        """Nor more than the request may have, nor anything where only sampled tokens count."""
        path = list(self.path(seed))
        for at in range(len(path)):
            req, constraint = self.along(path[:at], flags=0)
            forced = answer(constraint, append(req, path[at]), more=False)
            if isinstance(forced, FinishReason):
                break
            assert len(forced) <= req.remaining_tokens, f"it forces {len(forced)} of {req.remaining_tokens} tokens"
            for number, token in enumerate(forced, 1):
                reason = answer(constraint, append(req, token), more=number < len(forced))
                assert not failed(reason), f"it forces {token} and fails by it: {reason}"
            single, constraint = self.along(path[:at])
            assert not answer(constraint, append(single, path[at]), more=False), "it forces tokens of a single request"

    @pytest.mark.parametrize("seed", SEEDS)
    def test_tokens_that_come_together_come_one_by_one(self, seed: int) -> None:
        """With `more` nothing is looked for in between, and nothing is missed."""
        path = list(self.path(seed))
        for at, length in itertools.product(range(0, len(path), 3), (2, 4)):
            part = path[at : at + length]
            req, constraint = self.along(path[:at], flags=SINGLE * (length == 2))
            found: FinishReason | Sequence[int] = ()
            for number, token in enumerate(part, 1):
                more = number < len(part)
                found = answer(constraint, append(req, token), more=more)
                assert not failed(found), f"after tokens that came together it fails: {found}"
                if isinstance(found, FinishReason):
                    break
                assert not (more and found), "it forces tokens although the next one is known"
            other, alone = self.along(path[: at + length])
            ended = isinstance(found, FinishReason) or not req.remaining_tokens
            assert ended == other.finished, "tokens that come together end it elsewhere"
            if not (found or other.finished):
                assert same(constraint.mask(), alone.mask()), "after several tokens its mask is another one"

    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_tree_is_cut_to_what_may_come(self, seed: int) -> None:
        rng = random.Random(seed)
        path = list(self.path(seed))
        for at in range(0, len(path), 2):
            req, constraint = self.along(path[:at])
            if req.finished or not constraint.room(8):
                continue
            tokens, parents = self.tree(rng, path[:at])
            keep, masks = constraint.walk((tokens, parents), req.remaining_tokens)
            assert keep.shape == (len(tokens),), "walk() answers for another number of nodes"
            assert keep[0], "node 0 is always kept"
            assert len(masks.free) == len(masks.bits) == keep.sum(), "it tells of other nodes than it keeps"
            self.check_nodes(path[:at], tokens, parents, keep, masks)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_looking_at_a_tree_changes_nothing(self, seed: int) -> None:
        rng = random.Random(seed)
        path = list(self.path(seed))
        for at in range(len(path)):
            req, constraint = self.along(path[:at])
            other, untouched = self.along(path[:at])
            if constraint.room(8):
                constraint.walk(self.tree(rng, path[:at]), req.remaining_tokens)
            assert same(constraint.mask(), untouched.mask()), "walk() has changed the mask"
            reasons = [take(bound, by, path[at]) for bound, by in ((req, constraint), (other, untouched))]
            assert reasons[0] == reasons[1], f"after walk() advance() answers {reasons[0]}, without it {reasons[1]}"
            if reasons[0] is None:
                assert same(constraint.mask(), untouched.mask()), "after walk() it goes on elsewhere"

    # ---- what they share -------------------------------------------------------------------------------------------

    def new(self, flags: int) -> tuple[Req, TokenConstraint]:
        req = Req("r", np.array(PROMPT), SamplingParams(max_new_tokens=LONGEST), eos_ids=frozenset({2}))
        req.flags |= flags
        constraint = self.make(req)
        constrain(req, constraint)
        return req, constraint

    def walk_along(self, seed: int) -> Iterator[tuple[Req, TokenConstraint, int]]:
        """Yield a request with tokens that may come next, until it ends; the caller takes each."""
        rng = random.Random(seed)
        req, constraint = self.new(SINGLE)
        while not req.finished:
            yield req, constraint, rng.choice(allowed(constraint))

    def path(self, seed: int) -> Iterator[int]:
        """Yield the tokens of one output, the last of which ends it."""
        for req, constraint, token in self.walk_along(seed):
            yield token
            take(req, constraint, token)

    def along(self, path: Sequence[int], flags: int = SINGLE) -> tuple[Req, TokenConstraint]:
        """Return a request that has these tokens."""
        req, constraint = self.new(SINGLE)
        for token in path:
            take(req, constraint, token)
        req.flags = req.flags & ~SINGLE | flags
        return req, constraint

    def tree(self, rng: random.Random, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return a tree of which some nodes may come, and others may not."""
        tokens, parents = [path[-1] if path else PROMPT[-1]], [-1]
        paths: list[list[int] | None] = [list(path)]
        while len(tokens) < 8:
            parent = rng.randrange(len(tokens))
            before = paths[parent]
            may: list[int] = []
            if before is not None:
                req, constraint = self.along(before)
                may = [] if req.finished else allowed(constraint)
            good = bool(may) and rng.random() < 0.7
            tokens.append(rng.choice(may) if good else rng.randrange(64))
            parents.append(parent)
            paths.append([*(before or ()), tokens[-1]] if good else None)
        return tokens, parents

    def check_nodes(
        self, path: Sequence[int], tokens: list[int], parents: list[int], keep: NDArray[np.bool_], masks: NodeMasks
    ) -> None:
        places = np.cumsum(keep) - 1
        for node in np.flatnonzero(keep)[1:].tolist():
            assert keep[parents[node]], f"it keeps node {node} without its parent"
            way, at = [tokens[node]], parents[node]
            while at:
                way.insert(0, tokens[at])
                at = parents[at]
            req, constraint = self.along(path)
            for token in way:
                may = [] if req.finished else allowed(constraint)
                assert token in may, f"it keeps {token}, which may not come"
                take(req, constraint, token)
            assert not req.finished, f"it keeps {tokens[node]}, which ends the output"
            place = places[node]
            mask = None if masks.free[place] else masks.bits[place]
            assert same(mask, constraint.mask()), f"the mask of node {node} is not that of a request that is there"


def allowed(constraint: TokenConstraint) -> list[int]:
    """Return the tokens that may come next; the first few where any may."""
    mask = constraint.mask()
    if mask is None:
        return list(range(64))
    assert mask.dtype == np.int32, f"the mask is of {mask.dtype}, not int32"
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert found, "mask() allows no token at all"
    return found


def append(req: Req, token: int) -> int:
    req.tokens.append(token)
    return token


def answer(constraint: TokenConstraint, token: int, *, more: bool) -> FinishReason | Sequence[int]:
    """Return what `advance` says in the end."""
    until = time.monotonic() + PATIENCE
    while (found := constraint.advance(token, more)) is LATER:
        assert time.monotonic() < until, f"advance() still says LATER after {PATIENCE:g} s"
        time.sleep(0.001)
    return found


def take(req: Req, constraint: TokenConstraint, token: int) -> FinishReason | None:
    """Give a request a token, as the core does, and those that must come after it; why it ends, if it does."""
    core = Constraints(Points())
    append(req, token)
    until = time.monotonic() + PATIENCE
    while True:
        req.output.finish_reason = core.advance(req, req.tokens.last, ())
        if not core.later:
            return req.output.finish_reason
        core.later.clear()
        assert time.monotonic() < until, f"advance() still says LATER after {PATIENCE:g} s"
        time.sleep(0.001)


def failed(found: object) -> bool:
    return isinstance(found, FinishReason) and found.status >= 400


def same(first: NDArray[np.int32] | None, second: NDArray[np.int32] | None) -> bool:
    return first is second or (first is not None and second is not None and bool((first == second).all()))
