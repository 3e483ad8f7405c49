"""Known minus computed: a request with several known tokens computes all of them in one step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.req import Req
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.running import RunningBatch
from tests.core.pipeline import test_company
from tests.core.pipeline.harness import IGNORE, Harness, next_token
from tests.core.pipeline.noticing import noticed
from tests.core.pipeline.test_company_mutants import goes_on_with_the_dead

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
PHRASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Phrases(Harness):
    """A harness whose requests are told some of their output. `start` lets requests run until each has a token."""

    def start(self, n: int, *rids: str, **more: Any) -> list[Req]:
        self.known: dict[str, list[int]] = {}
        for number, rid in enumerate(rids):
            self.submit(rid, [number + 1] * 5, n, **(more or IGNORE))
        reqs = [self.scheduler.requests.alive[rid] for rid in rids]
        while not all(req.output_len for req in reqs):
            self.step()
        return reqs

    def tell(self, req: Req, tokens: Sequence[int]) -> None:
        """Make tokens known, as a finisher does in a commit: with no step of the request under way."""
        in_flight, self.scheduler.loop.in_flight = self.scheduler.loop.in_flight, None
        if in_flight is not None:
            self.scheduler.settle(in_flight)
        for token in tokens:
            req.tokens.append(token)
        self.known[req.rid] = req.tokens.view().tolist()
        self.scheduler.running.refresh([req])

    def check(self, *reqs: Req) -> None:
        """Every token after those that were told is the model's."""
        self.run()
        for req in reqs:
            tokens = self.known[req.rid]
            while len(tokens) < req.seq_len:
                tokens.append(next_token(np.array(tokens)))
            assert self.tokens(req.rid) == tokens[req.input_len :]


def catching_up(harness: Harness) -> list[ModelWorkerBatch]:
    return [
        one for one in harness.model.batches if one.forward_mode is not ForwardMode.DECODE and one.prefix_lens.all()
    ]


@LOOPS
@pytest.mark.parametrize("more", [{}, {"mixed_chunk": True}, {"chunk": 4}, {"page_size": 4}, {"run": 1}])
def test_a_gap_is_computed_in_one_step_beside_decodes(loop: str, more: dict[str, Any]) -> None:
    harness = Phrases(loop=loop, **more)
    first, second = harness.start(40, "a", "b")
    harness.tell(second, [])
    harness.tell(first, PHRASE)
    harness.model.batches.clear()
    harness.check(first, second)
    (step,) = catching_up(harness)
    assert step is harness.model.batches[0]
    assert step.extend_lens.tolist() == [len(PHRASE) + 1, 1]
    assert harness.scheduler.counters.retractions == 0


def test_what_does_not_fit_a_chunk_is_next() -> None:
    """The one that waits longest goes first, so that those that gain tokens in every step do not keep it out."""
    harness = Phrases(chunk=12)
    reqs = harness.start(60, "a", "b")
    for req in reqs:
        harness.tell(req, PHRASE)
    harness.model.batches.clear()
    order = []
    for _ in range(4):
        before = len(harness.model.batches)
        while len(harness.model.batches) == before:
            harness.step()
        order += [
            rid for rid, row in (("a", reqs[0].kv.row), ("b", reqs[1].kv.row)) if row in harness.model.batches[-1].rows
        ]
        for req in reqs:
            if int(harness.scheduler.running.gaps[harness.scheduler.running.places[id(req)]]) == 1:
                harness.tell(req, PHRASE)
    assert len(order) >= 4
    assert all(one != other for one, other in itertools.pairwise(order))
    harness.check(*reqs)


@LOOPS
@pytest.mark.parametrize("page_size", [1, 4])
def test_room_is_made_for_all_of_it(loop: str, page_size: int) -> None:
    harness = Phrases(loop=loop, tokens=40, page_size=page_size, cache="none", estimate_max_new_tokens=1, run=1)
    reqs = harness.start(30, "a", "b", "c", sampling={"ignore_eos": False})
    for req in reqs:
        harness.tell(req, PHRASE)
    harness.check(*reqs)
    assert harness.scheduler.counters.retractions > 0


@LOOPS
def test_a_step_that_fails_is_repaired(loop: str) -> None:
    harness = Phrases(loop=loop)
    reqs = harness.start(30, "a", "b", "c")
    for req in reqs:
        harness.tell(req, PHRASE)
    calls = iter((True, False, True))
    harness.model.fail_on = lambda work: next(calls, False)
    harness.run()
    assert [harness.finish(req.rid)["type"] for req in reqs].count("abort") <= 1
    harness.check(*[req for req in reqs if harness.finish(req.rid)["type"] != "abort"])


# ---- mutants ---------------------------------------------------------------------------------------------------------


def computes_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens that have become known."""
    take = RunningBatch._take

    def newest(self: RunningBatch, place: int, req: Req, coming: int = 0) -> None:
        take(self, place, req, coming)
        self._ints[-1, place] = 1

    monkeypatch.setattr(RunningBatch, "_take", newest)


def has_room_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens that have become known."""
    extend = MemoryManager.extend_running

    def one(self: MemoryManager, running: RunningBatch) -> bool:
        uneven, running.uneven = running.uneven, False
        found = extend(self, running)
        running.uneven = uneven
        return found

    monkeypatch.setattr(MemoryManager, "extend_running", one)


@pytest.mark.full
@pytest.mark.parametrize("change", [goes_on_with_the_dead, computes_the_newest, has_room_for_the_newest])
def test_broken_gaps_are_noticed_in_company(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    monkeypatch.setattr(test_company, "PATIENCE", 5.0)  # a hang is noticed, too
    for seed in range(400):
        if noticed(change, partial(test_company.play, seed, monkeypatch)):
            return
    pytest.fail("nothing is noticed")
