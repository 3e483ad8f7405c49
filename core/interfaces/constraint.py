"""TokenConstraint: what binds the tokens of a request, so that its output has a form.

A Stage says in `arrive` that a request will have one (`Interest.constrained`), and puts it into the request before the
request is admitted, when a gate opens for example. From then on the core asks it which tokens may come next, which of
those that are only proposed may come, and what follows from each token that the request got.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pegboard.core.interfaces.req import ReqSlot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.status import FinishReason


class Later(enum.Enum):
    """The answer of a constraint that needs longer than a step may take."""

    LATER = "later"


LATER: Final = Later.LATER


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """What may follow each node of a tree: `bits` int32 [nodes, words] as in `mask`, any token where `free` bool
    [nodes].
    """

    bits: NDArray[np.int32]
    free: NDArray[np.bool_]

    def keep(self, nodes: NDArray[np.bool_]) -> NodeMasks:
        """Return those of some nodes."""
        return NodeMasks(self.bits[nodes], self.free[nodes])


class TokenConstraint(abc.ABC):
    """Binds one request's tokens. Called in the scheduler's loop while none of its steps is under way. What it raises
    fails the request.
    """

    @abc.abstractmethod
    def room(self, n: int) -> bool:
        """Return whether `walk` may look at a tree of `n` nodes now. False: nothing is proposed for this step."""

    @abc.abstractmethod
    def mask(self) -> NDArray[np.int32] | None:
        """Return int32 [words] with a bit for each token that may come next, bit i%32 of word i//32 for token i; None:
        any may. At least one may. The caller copies it.
        """

    @abc.abstractmethod
    def walk(self, tree: tuple[Sequence[int], Sequence[int]], remaining: int) -> tuple[NDArray[np.bool_], NodeMasks]:
        """Return which nodes of a tree of proposed tokens to keep, bool [nodes], and what may come after each of these.

        `tree` has the nodes' tokens, and the index of each one's parent, which comes before it; node 0 is the newest
        token of the request, and always kept. The request may get `remaining` more tokens. A node is kept only with its
        parent, if it may come there and the model is to be asked what comes after it: it ends nothing, and forces
        nothing that `advance` would return. Changes nothing that can be seen from outside. Where it fails
        to look at a tree, it keeps node 0 alone.
        """

    @abc.abstractmethod
    def advance(self, token: int, more: bool) -> FinishReason | Sequence[int] | Later:
        """Go on by a token that the request got, its newest one, which nothing else has ended.

        Return why the request ends; or the tokens that must come next, to be taken without asking the model: each is
        appended, and `advance` is called for it, unless it ends the request. Return none where the request's length is
        reached, where it takes no tokens but sampled ones (`Req.single`), and with `more`: further tokens are known
        already, for each of which `advance` is called at once, and `mask` only after the last.

        LATER: it is not known yet. The request is in no batch, and may lose its memory, until the same call, repeated
        before each step, returns something else.
        """


@dataclass(slots=True)
class _Place:
    """Where a request keeps its constraint."""

    constraint: TokenConstraint | None = None


_PLACE = ReqSlot(_Place)


def constrain(req: Req, constraint: TokenConstraint | None) -> None:
    """Give a request its constraint, or take it away, at the very end."""
    if constraint is None:
        _PLACE.clear(req)
    else:
        _PLACE.of(req).constraint = constraint


def constraint_of(req: Req) -> TokenConstraint | None:
    """Return a request's constraint; None for one that has none, or not yet."""
    place = _PLACE.peek(req)
    return None if place is None else place.constraint
