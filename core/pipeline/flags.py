"""Flags of requests: what a step must know of each, in bits, so that it is seen at once where none has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

SPECIAL = 1
"""Its finish or its output needs more than a look at the token: stop strings, stop token ids, logprobs."""
LOGPROBS = 2
PROCESSED = 4
"""Some logits processor wants it."""
HISTORY = 8
"""A logits processor or its constraint reads the tokens that it has generated: known before its next step."""
STREAM = 16
CONSTRAINED = 32
"""It has a TokenConstraint."""
# 64 is SINGLE.
SHIFTED = 128
"""Positions of its tokens are not their indices."""
ALONE = 256
"""What it wants cannot tell tokens ahead from its output: it gets none ahead."""
FIRST_STAGE = 512
"""A stage takes part in it; each stage has a bit of its own from here on."""


def flags_of(req: Req, asked: Iterable[Any], alone: Sequence[object] = ()) -> int:
    """Return a request's flags. Those of `asked` that are in `alone` cannot tell tokens ahead from output. Calls plugin
    code (`wants`), so it may raise.
    """
    params = req.sampling
    flags = STREAM if req.stream else 0
    if params.stop or params.stop_token_ids or req.logprobs is not None:
        flags |= SPECIAL
    if req.logprobs is not None:
        flags |= LOGPROBS
    for one in asked:
        if one.wants(params):
            flags |= PROCESSED | (HISTORY if one.reads_output else 0)
            flags |= ALONE if any(one is other for other in alone) else 0
    return flags


def flags_any_of(reqs: Iterable[Req]) -> int:
    """Return the flags that some of these requests have."""
    return reduce(or_, (req.flags for req in reqs), 0)
