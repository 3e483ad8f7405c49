"""What the suite of SchedulePolicy asks with: requests, a cache that can only be read, and checks of an answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NoReturn

import numpy as np
from hypothesis import strategies as st

from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixMatch
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import ReqStatus

_NAMES = itertools.count()


class ReadOnlyCache(PrefixCache):
    """A prefix cache that knows what it is told to know, can only be matched, and raises for all that changes one.

    `known` are the token lists that it answers for, in the namespace "". `readable` False makes even `match` raise.
    """

    def __init__(self, *known: Sequence[int], page_size: int = 1, readable: bool = True) -> None:
        self.page_size = page_size
        self.version = 0
        self.readable = readable
        self.known = [np.array(tokens, dtype=np.int64) for tokens in known]
        self.matches = 0

    def learn(self, *known: Sequence[int]) -> None:
        """Know these token lists and nothing else."""
        self.known = [np.array(tokens, dtype=np.int64) for tokens in known]
        self.version += 1

    def match(self, key: PrefixKey) -> PrefixMatch:
        if not self.readable:
            raise AssertionError("the policy reads the prefix cache without declaring the capability cache_aware")
        self.matches += 1
        length = 0
        for tokens in self.known if key.namespace == "" else ():
            common = min(len(tokens), len(key))
            differs = np.flatnonzero(tokens[:common] != key.tokens[:common])
            length = max(length, int(differs[0]) if differs.size else common)
        length -= length % self.page_size
        return PrefixMatch(np.arange(length, dtype=np.int64), object())

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a schedule policy may read the prefix cache with match(), and change nothing in it")

    lock = unlock = insert = evict = reset = _refuse

    @property
    def evictable_tokens(self) -> int:
        return sum(map(len, self.known))

    @property
    def locked_tokens(self) -> int:
        return 0


def queued(
    prompt: Sequence[int],
    *,
    generated: Sequence[int] = (),
    max_new_tokens: int = 16,
    priority: int = 0,
    space: str = "",
    arrived: float | None = None,
    kind: type[Req] = Req,
    rid: str = "",
    **fields: Any,
) -> Req:
    """Return a waiting request; one that has generated tokens was retracted. `arrived` is when it came, now by default;
    `fields` go to Req (name, principal, params).
    """
    req = kind(
        rid or f"req-{next(_NAMES)}",
        np.array(prompt, dtype=np.int64),
        SamplingParams(max_new_tokens=max_new_tokens),
        priority=priority,
        namespace=space,
        arrived=arrived,
        **fields,
    )
    req.timing.ready = req.timing.queued = req.timing.arrived
    for token in generated:
        req.tokens.append(token)
    if generated:
        req.move_to(ReqStatus.RUNNING)
        req.move_to(ReqStatus.RETRACTED)
    return req


def active(
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    max_new_tokens: int = 16,
    priority: int = 0,
    arrived: float | None = None,
    kind: type[Req] = Req,
    **fields: Any,
) -> Req:
    """Return a running request. The arguments are those of `queued`."""
    req = queued(prompt, max_new_tokens=max_new_tokens, priority=priority, arrived=arrived, kind=kind, **fields)
    for token in generated:
        req.tokens.append(token)
    req.move_to(ReqStatus.RUNNING)
    req.kv.row = 1
    return req


_TOKENS = st.lists(st.integers(0, 3), max_size=6)
_ARRIVALS = st.sampled_from((0.0, 5.0, 30.0, 1000.0))
_CLIENTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(({}, {"name": "job", "principal": "team"}))
"""What clients call their requests need not be unique."""
STEMS: tuple[list[int], ...] = ([], [7] * 40, [7] * 40 + [8] * 40, [9] * 64, [5])


@st.composite
def _prompts(draw: st.DrawFn) -> list[int]:
    stem = draw(st.sampled_from(STEMS))
    return stem + draw(_TOKENS) or [1]


@st.composite
def waiting_req(draw: st.DrawFn) -> Req:
    return queued(
        draw(_prompts()),
        generated=draw(st.sampled_from(([], [], [], [1], [2, 3, 4]))),
        max_new_tokens=draw(st.integers(1, 5)),
        priority=draw(st.integers(-2, 2)),
        space=draw(st.sampled_from(("", "", "other"))),
        arrived=draw(_ARRIVALS),
        **draw(_CLIENTS),
    )


@st.composite
def running_req(draw: st.DrawFn) -> Req:
    return active(draw(_prompts()), draw(_TOKENS), priority=draw(st.integers(-2, 2)), arrived=draw(_ARRIVALS))


def arriving(draw: random.Random) -> Req:
    stem, tail = draw.choice(STEMS), [draw.randrange(4) for _ in range(draw.randrange(1, 5))]
    return queued([*stem, *tail], max_new_tokens=draw.randrange(1, 6), priority=draw.randrange(-2, 3))


QUEUES = st.lists(waiting_req(), max_size=12)
CACHES = st.lists(_prompts(), max_size=4)


def state_of(req: Req) -> tuple[Any, ...]:
    """Return what a policy must leave as it is: everything but the slots."""
    kv = req.kv
    return (
        *(req.rid, req.status, req.priority, req.namespace, req.sampling, req.input_len, req.seed, req.flags),
        *(tuple(req.tokens.view()), req.blocked_by, req.stream, req.output.finish_reason, req.output.sent_len),
        *(kv.row, kv.prefix_len, kv.committed_len, kv.allocated_len, kv.cache_len, kv.handle),
        astuple(req.timing),
    )


def check_permutation(given: Sequence[Req], answer: Sequence[Req], call: str = "order()") -> None:
    """Each given request exactly once, and no other. The message names those that are wrong."""
    __tracebackhide__ = True
    assert isinstance(answer, list), f"{call} answers with a {type(answer).__name__}, not with a list"
    for one in answer:
        assert isinstance(one, Req), f"{call} answers with {one!r}, which is not a request"
    found: dict[int, int] = {}
    for req in answer:
        found[id(req)] = found.get(id(req), 0) + 1
    known = {id(req) for req in given}
    lost = [req for req in given if id(req) not in found]
    assert not lost, (
        f"{call} loses {_named(lost)}, {len(lost)} of {len(given)} requests: it must answer with all of them"
    )
    strangers = [req for req in answer if id(req) not in known]
    assert not strangers, f"{call} names {_named(strangers)}, which it was not asked about{_hint(strangers)}"
    again = [req for req in given if found[id(req)] > 1]
    assert not again, f"{call} names {_named(again)} more than once: each request once"


def check_named(given: Sequence[Req], answer: Sequence[Req]) -> None:
    """Check an answer of `preempt`: some of the given requests, each at most once."""
    __tracebackhide__ = True
    assert isinstance(answer, list), f"preempt() answers with a {type(answer).__name__}, not with a list"
    named = {id(req) for req in answer}
    check_permutation([req for req in given if id(req) in named], answer, "preempt()")


def _named(reqs: Sequence[Req]) -> str:
    names = [f"{one!r} (priority {one.priority})" for one in dict.fromkeys(reqs)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hint(strangers: Sequence[Req]) -> str:
    if all(one.status is ReqStatus.RUNNING for one in strangers):
        return ": they run already"
    if all(one.status is not ReqStatus.RUNNING for one in strangers):
        return ": they do not run"
    return ""


class Anything(Mapping[str, Any]):
    """The params of a client that says `said` to every plugin there is."""

    def __init__(self, said: Any) -> None:
        self._said = said

    def __getitem__(self, name: str) -> Any:
        return self._said

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(("anything",))

    def __len__(self) -> int:
        return 1
