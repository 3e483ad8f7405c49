"""Growth: how much memory running requests are expected to need yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.running import RunningBatch


@dataclass(slots=True)
class NewTokenRatio:
    """Which part of its allowed tokens a running request is expected to generate. Adapts as in SGLang.

    Starts at `start`, 1 at most, decays linearly over `decay_steps` decode steps to `floor` x start, and jumps after a
    retraction to what would have avoided it. `clip` bounds what is expected of any request.
    """

    start: float
    floor: float
    decay_steps: int
    clip: int
    current: float = 0.0

    def __post_init__(self) -> None:
        self.start = min(1.0, self.start)
        self.current = self.start

    @property
    def minimum(self) -> float:
        return self.start * self.floor

    def decay(self) -> None:
        step = (self.start - self.minimum) / self.decay_steps
        self.current = max(self.minimum, self.current - step)

    def raise_after_retraction(self, running: RunningBatch, lookahead: int) -> None:
        """Set it so that every running request may grow `lookahead` more tokens."""
        outputs = running.known_lens - running.input_lens
        allowed = int(np.minimum(outputs + running.left, self.clip).sum())
        done = int(outputs.sum())
        self.current = max(self.current, min(1.0, (done + lookahead * len(running)) / max(1, allowed)))

    def most(self, req: Req) -> int:
        """Return how many more tokens are expected of a request at most."""
        return min(req.remaining_tokens, self.clip)

    def share(self, req: Req) -> int:
        """Return how many tokens a running request is expected to add."""
        return int(self.most(req) * self.current)

    def shares(self, running: RunningBatch) -> int:
        """Return how many tokens all running requests are expected to add."""
        return int((np.minimum(running.left, self.clip) * self.current).astype(np.int64).sum())


def survives(
    req: Req,
    left: int,
    free: int,
    running: RunningBatch,
    others: Sequence[Req],
    ratio: NewTokenRatio,
    page: int,
    gone: AbstractSet[int] = frozenset(),
) -> bool:
    """Return whether `free` tokens, in pages of `page`, suffice from now on until everybody has ended: `req`, `left` of
    which are to be computed, `others` that hold memory, and the running requests but for those whose `id` is in `gone`.
    After SGLang's add_one_req_ignore_eos.

    Requests end in the order of what they have left: exactly all of it where end-of-sequence tokens are ignored,
    and the expected share of it elsewhere. Until the next one ends each of the others takes a token per step; then
    its own memory is free again.
    """
    stay = np.fromiter((id(other) not in gone for other in running.reqs), np.bool_, len(running))
    staying = [one for one, stays in zip(running.reqs, stay.tolist(), strict=True) if stays]
    ratios = [1.0 if one.sampling.ignore_eos else ratio.current for one in (*staying, *others)]
    lefts = np.concatenate([running.left[stay], [one.remaining_tokens for one in others]])
    owned = [one.seq_len - one.kv.prefix_len for one in (*staying, *others)]
    lasting = np.append(np.ceil(lefts * ratios), req.remaining_tokens)
    freed = np.append(np.array(owned, np.float64), left)
    order = np.argsort(lasting, kind="stable")
    lasting, freed = lasting[order], freed[order]
    left_then = np.arange(lasting.shape[0], 0, -1)
    waits = np.diff(lasting, prepend=0.0)
    taken = np.cumsum(waits * left_then)
    given_back = np.concatenate([[0.0], np.cumsum(freed + lasting)[:-1]])
    later = sum(one.seq_len - one.kv.scheduled_len for one in others) + int((running.gaps[stay] - 1).sum())
    free = free - later - -(-left // page) * page
    # Each may hold a page of which it uses one token only.
    slack = left_then * (page - 1)
    return bool((free - taken + given_back >= slack).all())
