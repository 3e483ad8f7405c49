"""Same tokens from two engines as from one: prompts are computed on one, and answers written on the other.

The requests and their references are those of test_scheduling_matrix.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from pegboard.conformance.covering import covering
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from tests.e2e.disagg_pair import Pair, assert_answered, pair
from tests.e2e.test_scheduling_matrix import EOS, TIGHT, World, check, world

__all__ = ["world"]


class Setting(NamedTuple):
    loop: str
    chunk: int
    pages: tuple[int, int]
    transfer: str
    tight: bool

    def config(self, world: World, page_size: int, tokens: int) -> dict[str, Any]:
        return world.config(
            memory={"page_size": page_size, "max_total_tokens": tokens},
            scheduler={
                "loop": self.loop,
                "chunked_prefill_size": self.chunk,
                "max_running_requests": 24,
                "estimate_max_new_tokens": 1 if self.tight else 4096,
            },
        )

    @contextlib.contextmanager
    def pair(self, world: World, **options: Any) -> Iterator[Pair]:
        prefill = self.config(world, self.pages[0], 2 * TIGHT if self.tight else 4096)
        decode = self.config(world, self.pages[1], TIGHT if self.tight else 4096)
        with pair(prefill, decode, transfer=self.transfer, **options) as both:
            yield both

    def __str__(self) -> str:
        tight = "tight" if self.tight else "roomy"
        return f"{self.loop}-chunk_{self.chunk}-pages_{self.pages[0]}_{self.pages[1]}-{self.transfer}-{tight}"


VALUES: tuple[tuple[Any, ...], ...] = (
    ("normal", "overlap"),
    (32, 256, 0),
    ((1, 1), (16, 16), (1, 16), (16, 1)),
    ("tcp", "inproc"),
    (False, True),
)
ALL = list(itertools.starmap(Setting, itertools.product(*VALUES)))
FEW = [Setting("overlap", 32, (16, 1), "tcp", False)]
REST = [one for one in covering(ALL, 2) if one not in FEW]


def run(setting: Setting, world: World) -> None:
    with setting.pair(world) as both:
        answers, firsts = both.ask([case.request for case in world.cases])
        assert_answered([*answers, *firsts])
        check(world.cases, answers)
        assert all(len(one.token_ids) <= 1 for one in firsts)
        check_moved(both, world)
        both.settle()
        both.check_books()


def check_moved(both: Pair, world: World) -> None:
    """Nothing was computed twice, unless it was retracted."""
    stats = both.decode.stats()
    told = stats["gate_stats"]["disagg"]
    assert told["rooms_arrived_total"] == len(world.cases)
    assert told["transfer_reads_done_total"] > 0
    if not stats["retractions"]:
        assert stats["prompt_tokens"] == 0


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_two_engines(setting: Setting, world: World) -> None:
    run(setting, world)


@pytest.mark.full
@pytest.mark.parametrize("setting", REST, ids=str)
def test_every_pair_of_settings(setting: Setting, world: World) -> None:
    run(setting, world)


PLAIN = Setting("overlap", 32, (16, 1), "inproc", False)


def test_what_decode_has_cached_does_not_travel(world: World) -> None:
    """The second time only the last token of each prompt does, and answers are the same."""
    requests = [case.request for case in world.cases]
    with PLAIN.pair(world) as both:
        both.ask(requests)
        before = moved(both)
        answers, _ = both.ask(requests)
        check(world.cases, answers)
        assert moved(both) - before <= 0.05 * before
        assert any(one.cached_tokens for one in answers), "what prefill had cached is told"
        both.settle()
        both.check_books()


def test_a_speculator_on_decode_alone(world: World) -> None:
    """One that keeps nothing in the pool: what prefill has need not be alike, and answers are the same."""
    config = PLAIN.config(world, 16, 4096)
    speculation = {"use": "ngram", "min_match": 1, "max_nodes": 8, "adaptive": False}
    with pair(config, {**config, "speculation": speculation}, transfer="inproc") as both:
        answers, _ = both.ask([case.request for case in world.cases])
        assert_answered(answers)
        check(world.cases, answers)
        assert any(one.drafted_tokens for one in answers)
        both.settle()
        both.check_books()


def moved(both: Pair) -> float:
    return float(both.decode.stats()["gate_stats"]["disagg"]["bytes_read_total"])


def test_ends_at_the_first_token(world: World) -> None:
    """By a limit, a stop token, and a stop string: both sides know, and nothing is held for long."""
    case = world.cases[12]
    first = case.answer.token_ids[0]
    kinds: list[dict[str, Any]] = [{"max_new_tokens": 1}, {"stop_token_ids": (first,)}, {"logit_bias": {EOS: 99.0}}]
    requests = [
        GenerateRequest(prompt=case.request.prompt, rid=f"r{i}", sampling=SamplingParams(temperature=0.0, **kind))
        for i, kind in enumerate(kinds)
    ]
    with PLAIN.pair(world) as both:
        alone = both.prefill.run(requests)
        answers, _ = both.ask(requests)
        assert_answered(answers)
        assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
        assert [one.finish_reason for one in answers] == [one.finish_reason for one in alone]
        both.settle()
        both.check_books()


def test_hidden_states_and_grammars(world: World) -> None:
    """The first token's state travels with it, and each grammar takes the token once."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    shaped = SamplingParams(temperature=0.0, max_new_tokens=24, grammar=Grammar("regex", "(12|34){3,6}x"))
    prompt = world.cases[0].request.prompt
    requests = [
        GenerateRequest(prompt=prompt, rid="states", sampling=greedy, return_hidden_states=True),
        GenerateRequest(prompt=prompt, rid="shaped", sampling=shaped),
    ]
    configs = [PLAIN.config(world, page_size, 4096) for page_size in PLAIN.pages]
    prefill, decode = [{**one, "model": {**one["model"], "hidden_states": True}} for one in configs]
    with pair(prefill, decode, transfer="inproc") as both:
        alone = both.prefill.run(requests)
        answers, _ = both.ask(requests)
        assert_answered(answers)
        assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
        assert re.fullmatch("(12|34){3,6}x?", answers[1].text)
        ours, theirs = (np.array(one[0].hidden_states) for one in (answers, alone))
        assert ours.shape == theirs.shape == (8, theirs.shape[1])
        assert np.allclose(ours, theirs, atol=1e-3)


def test_a_request_that_prefill_refuses_ends_on_decode(world: World) -> None:
    """And one that its client gives up: neither leaves anything behind."""
    request = world.cases[0].request
    with PLAIN.pair(world) as both:
        params = both.said()
        rids = [engine.submit(msgspec.structs.replace(request, params=params)) for engine in both.both]
        for engine in both.both:
            engine.poll()
        both.prefill.abort(rids[0])
        reason = None
        while reason is None:
            both.prefill.built.scheduler.step()
            reason = next((one.finish_reason for one in both.decode.poll() if one.finish_reason), None)
        assert reason["status"] == 502
        both.settle()
        both.check_books()


def test_a_prefill_engine_that_goes_is_noticed(world: World) -> None:
    requests = [case.request for case in world.cases[:6]]
    with PLAIN.pair(world) as both:
        params = [both.said() for _ in requests]
        for one, said in zip(requests, params, strict=True):
            for engine in both.both:
                engine.submit(msgspec.structs.replace(one, params=said))
        for _ in range(3):
            for engine in both.both:
                engine.poll()
        both.prefill.close()
        began, ended = time.monotonic(), 0
        while ended < len(requests):
            assert time.monotonic() < began + 30.0
            ended += sum(one.finish_reason is not None for one in both.decode.poll())
        assert not both.left(both.decode)
        assert both.decode.built.scheduler.components.memory.idle_error() is None
