"""The running batch against a list of plain records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.flags import SPECIAL, STREAM
from pegboard.core.pipeline.growth import NewTokenRatio
from pegboard.core.pipeline.running import NEVER, UNSTAMPED, RunningBatch

CAPACITY, VOCAB = 12, 50


def make_req(number: int, *, length: int = 3, limit: int = 5, top_k: int = -1) -> Req:
    params = SamplingParams(max_new_tokens=limit, temperature=number / 8, top_k=top_k, top_p=0.5, min_p=0.25)
    req = Req(f"r{number}", np.arange(length, dtype=np.int64), params, seed=number * 7)
    req.kv.row, req.kv.allocated_len, req.kv.committed_len = number, length + 1, length - 1
    return req


@dataclass
class Kept:
    """What is expected of one request."""

    req: Req
    stamp: int
    known: int
    gap: int = 1
    last: int = 0
    time: float = 0.0

    @property
    def left(self) -> int:
        """How many more tokens may be scheduled for it."""
        return max(0, self.req.remaining_tokens - (self.known - self.req.seq_len))


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.batch = RunningBatch(CAPACITY, VOCAB)
        self.kept: list[Kept] = []
        self.number = 0
        self.version = self.batch.version

    @rule(
        count=st.integers(1, 3),
        flags=st.sampled_from([0, STREAM, SPECIAL | STREAM]),
        length=st.integers(1, 9),
        limit=st.integers(1, 9),
        top_k=st.sampled_from([-1, 0, 1, 7, VOCAB, 10**6]),
    )
    def join(self, count: int, flags: int, length: int, limit: int, top_k: int) -> None:
        count = min(count, CAPACITY - len(self.kept))
        reqs = [make_req(self.number + i, length=length, limit=limit, top_k=top_k) for i in range(count)]
        self.number += count
        for req in reqs:
            req.flags = flags
        self.batch.join(reqs, self.number)
        self.kept += [Kept(req, self.number, length + 1) for req in reqs]
        self.changed()

    @rule(length=st.integers(1, 9))
    def resume(self, length: int) -> None:
        """One joins whose tokens are all known."""
        if len(self.kept) < CAPACITY:
            req = make_req(self.number, length=length)
            self.batch.join([req])
            self.kept.append(Kept(req, UNSTAMPED, length, last=req.tokens.last))
            self.changed()

    @rule(count=st.integers(0, 3), data=st.data())
    def settle(self, count: int, data: st.DataObject) -> None:
        """Some have gained tokens, all of which are known."""
        gained = data.draw(st.lists(st.sampled_from(self.kept), unique_by=id)) if self.kept else []
        for one in gained:
            for token in range(min(count, one.req.remaining_tokens)):
                one.req.tokens.append(token)
            one.known, one.last = one.req.seq_len, one.req.tokens.last
            one.gap = one.known - one.req.kv.committed_len
        self.batch.refresh([*(one.req for one in gained), make_req(97)])

    @rule(count=st.integers(1, 3))
    def catch_up(self, count: int) -> None:
        """A step computes all known tokens of some, and samples one more for each."""
        behind = sorted((one for one in self.kept if one.gap > 1 and one.left > 0), key=lambda one: one.stamp)[:count]
        if not behind:
            return
        places = self.batch.catching_up()[:count].tolist()
        assert [self.batch[place] for place in places] == [one.req for one in behind]
        self.number += 1
        self.batch.join([one.req for one in behind], self.number)
        for one in behind:
            one.known, one.gap, one.last, one.stamp = one.req.seq_len + 1, 1, 0, self.number
        self.changed()

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        mask = data.draw(st.lists(st.booleans(), min_size=len(self.kept), max_size=len(self.kept)))
        self.batch.keep(np.array(mask, np.bool_))
        self.leave([one for one, stays in zip(self.kept, mask, strict=True) if not stays])

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.kept), unique_by=id)) if self.kept else []
        self.batch.remove([*(one.req for one in gone), make_req(99)])
        self.leave(gone)

    @rule(token=st.integers(0, VOCAB - 1), whole=st.booleans(), data=st.data())
    def note(self, token: int, whole: bool, data: st.DataObject) -> None:
        """Take tokens of all in order, or of some in any order, among them one that has left."""
        if not self.kept:
            return
        now = max(one.time for one in self.kept) + 1.0
        some = self.kept if whole else data.draw(st.lists(st.sampled_from(self.kept), unique_by=id))
        reqs = [one.req for one in some] + ([] if whole else [make_req(98)])
        tokens = np.arange(token, token + len(reqs), dtype=np.int64)
        version = self.batch.version if whole else NEVER
        intervals = self.batch.note(reqs, tokens, now, version)
        for place, one in enumerate(some):
            if one.time:
                assert intervals[place] == now - one.time
            one.last, one.time = int(tokens[place]), now
        assert np.isnan(intervals[len(some) :]).all()

    @rule()
    def rewind(self) -> None:
        self.batch.rewind()
        for one in self.kept:
            one.stamp, one.last, one.known = UNSTAMPED, one.req.tokens.last, one.req.seq_len
            one.gap = one.known - one.req.kv.committed_len

    def leave(self, gone: list[Kept]) -> None:
        for one in gone:
            assert one.req.timing.last_token == one.time, "what only the arrays knew is the request's again"
        self.kept = [one for one in self.kept if one not in gone]
        if gone:
            self.changed()

    def changed(self) -> None:
        assert self.batch.version > self.version
        self.version = self.batch.version

    @invariant()
    def agrees(self) -> None:
        batch, reqs = self.batch, [one.req for one in self.kept]
        assert batch.version == self.version
        assert [id(one) for one in batch] == [id(req) for req in reqs]
        assert batch.rows.tolist() == [req.kv.row for req in reqs]
        assert batch.input_lens.tolist() == [req.input_len for req in reqs]
        assert batch.allocated.tolist() == [req.kv.allocated_len for req in reqs]
        assert batch.stamps.tolist() == [one.stamp for one in self.kept]
        assert batch.flags.tolist() == [req.flags for req in reqs]
        assert batch.known_lens.tolist() == [one.known for one in self.kept]
        assert batch.gaps.tolist() == [one.gap for one in self.kept]
        assert batch.left.tolist() == [one.left for one in self.kept]
        assert batch.uneven == any(one.gap > 1 for one in self.kept)
        decoding = [place for place, one in enumerate(self.kept) if one.gap == 1 and one.left > 0]
        assert batch.decoding().tolist() == decoding
        assert batch.last.tolist() == [one.last for one in self.kept]
        assert batch.last_times.tolist() == [one.time for one in self.kept]
        assert batch.numbers.tolist() == [req.sampling.row(req.seed, VOCAB) for req in reqs]
        assert batch.any(SPECIAL) == any(req.flags & SPECIAL for req in reqs)
        assert all(req in batch for req in reqs)


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestRunningBatch = Machine.TestCase


def test_a_newcomer_counts_the_token_that_its_prompts_step_samples() -> None:
    batch = RunningBatch(2, VOCAB)
    batch.join([make_req(0, length=4, limit=5), make_req(1, length=2, limit=1)], 1)
    assert batch.known_lens.tolist() == [5, 3]
    assert batch.left.tolist() == [4, 0]
    batch.rewind()
    assert batch.known_lens.tolist() == [4, 2], "that step is not going to be used"
    assert batch.left.tolist() == [5, 1]


def test_growth_is_a_share_of_what_each_may_still_get() -> None:
    batch = RunningBatch(3, VOCAB)
    assert NewTokenRatio(1.0, 0.1, 10, clip=100).shares(batch) == 0
    batch.join([make_req(0, limit=101), make_req(1, limit=11), make_req(2, limit=1)], 1)
    assert NewTokenRatio(0.5, 0.1, 10, clip=1000).shares(batch) == 50 + 5 + 0
    assert NewTokenRatio(0.5, 0.1, 10, clip=20).shares(batch) == 10 + 5 + 0
