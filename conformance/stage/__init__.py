"""The conformance suite of stages: the scheduler's half of a feature.

A class says how to make the stage, and what a request has to ask for::

    class TestMyStage(StageContract):
        def make_stage(self) -> Stage:
            return MyStage(stage_context())

        def feature(self) -> object:
            return {"most": 4}
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.stage.kept import holds, size
from pegboard.conformance.stage.rig import Parts, StageRig
from pegboard.core.interfaces.batch import BatchExtras, ModelWorkerBatch
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Stage, StageContext, Wait
from pegboard.core.interfaces.step import AnySource, CoreServices

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
PROMPTS = {f"r{n}": [(n * 7 + i) % 250 for i in range(5 + 9 * n)] for n in range(5)}
LENGTH = 8


def stage_context(**more: Any) -> StageContext:
    """Return a context without a model. `more` replaces its fields."""
    given = {
        "config": SimpleNamespace(),
        "spec": ModelSpec("suite", 251, 8, 512, (), ()),
        "model": ModelContext(Path(), {}, torch.float32, torch.device("cpu")),
        "tokenizer": None,
        "runner": frozenset(),
        "choose": _no_provider,
        "provider": _no_provider,
        "find": lambda contract, ctx: None,
        "missing": lambda contract: (),
        "lacking": lambda capability: None,
        "end": _nothing_ends,
        "runner_name": "",
        "chunk_size": None,
        "scratch": Path(),
    }
    return StageContext(**{**given, **more})


class StageContract:
    """A stage takes part in the requests that ask for it, in no others, and leaves nothing behind."""

    def make_stage(self) -> Stage:
        """Return a new stage. Override."""
        raise NotImplementedError("say how to make the stage: override make_stage")

    def feature(self) -> object:
        """Return what its frontend half would send for a request in which it takes part. Override."""
        raise NotImplementedError("say what a request asks for: override feature")

    def compute(self, payload: object, work: ModelWorkerBatch) -> Parts:
        """Return what its device part would compute of a payload."""
        return {}

    def ended_text(self) -> tuple[SamplingParams, str]:
        """Return parameters, and a text that the stage ends with them more than once. Override it with
        `Stage.compile_stops`.
        """
        raise NotImplementedError("say which text it ends: override ended_text")

    def rig(self, stage: Stage | None, **more: Any) -> StageRig:
        return StageRig([] if stage is None else [stage], self.compute, **more)

    # ---- the tests -------------------------------------------------------------------------------------------------

    @LOOPS
    def test_it_takes_part_and_fails_nothing(self, loop: str) -> None:
        stage = self.make_stage()
        with ended(self.rig(stage, loop=loop)) as rig:
            self.submit_all(rig)
            taking = [req for req in rig.reqs.values() if req.flags & stage.flag]
            assert taking, f"it takes part in no request; arrive() answers None for the feature {self.feature()!r}"
            rig.run()
            counters = rig.scheduler.counters
            assert not counters.failed_batches, "a batch with its requests failed; the log says why"
            bad = [out.finish_reason for outs in rig.outputs.values() for out in outs if _failed(out.finish_reason)]
            assert not bad, f"requests failed: {bad}"

    @LOOPS
    def test_one_that_no_request_wants_changes_no_token(self, loop: str) -> None:
        with ended(self.rig(None, loop=loop)) as plain, ended(self.rig(self.make_stage(), loop=loop)) as rig:
            for one in (plain, rig):
                for rid, prompt in PROMPTS.items():
                    one.submit(rid, prompt, LENGTH, {})
                one.run()
            for rid in PROMPTS:
                assert rig.tokens(rid) == plain.tokens(rid), "answers of requests that do not ask for it are others"

    def test_packing_changes_no_request_and_gives_the_same_again(self) -> None:
        stage, packs = self.make_stage(), 0
        packed = type(stage).pack

        def pack_twice(step: Any, extras: BatchExtras) -> object | None:
            nonlocal packs
            packs += 1
            before, known = [_state(req) for req in step.batch.reqs], dict(extras.values)
            first = packed(stage, step, extras)
            assert [_state(req) for req in step.batch.reqs] == before, "pack() has changed a request"
            again = BatchExtras(len(step.batch.reqs), step.work.input_ids.shape[0], known)
            packed(stage, step, again)
            assert _plain(again.values) == _plain(extras.values), "pack() of the same batch brings other arrays"
            return first

        if packed is Stage.pack:
            pytest.skip("it packs nothing")
        vars(stage)["pack"] = pack_twice
        with ended(self.rig(stage)) as rig:
            self.submit_all(rig)
            rig.run()
            told = [out.finish_reason for outs in rig.outputs.values() for out in outs if _failed(out.finish_reason)]
            assert packs, "pack() was not called"
            assert not told, f"{told[0]}"

    @LOOPS
    def test_nothing_is_left_of_requests_that_ended(self, loop: str) -> None:
        """Some finish, some are aborted while they wait, run or have just begun, and memory is short."""
        stage = self.make_stage()
        with ended(self.rig(stage, loop=loop, tokens=96)) as rig:
            sizes = [self.play(rig, stage, number) for number in range(3)]
        for rid in PROMPTS:
            for number in range(3):
                assert not holds(stage, f"{rid}-{number}"), f"it still holds {rid}-{number}, which is gone"
        assert sizes[2] <= sizes[1], f"what it keeps grows with requests that are gone: {sizes} entries"

    @LOOPS
    def test_nothing_is_left_of_steps_that_failed(self, loop: str) -> None:
        """Batches fail and are halved, and steps behind them are undone."""
        stage = self.make_stage()
        with ended(self.rig(stage, loop=loop)) as rig:
            sizes = []
            for number in range(3):
                calls = 0

                def fails(work: ModelWorkerBatch) -> bool:
                    nonlocal calls
                    calls += 1
                    return calls in (2, 5)

                rig.model.fails = fails
                self.submit_all(rig, f"-{number}")
                rig.run()
                sizes.append(size(stage))
            assert rig.scheduler.counters.failed_batches >= 3
        assert sizes[2] <= sizes[1], f"what it keeps grows with steps that were undone: {sizes} entries"

    def test_a_request_is_known_once(self) -> None:
        """However often its memory is taken and given."""
        stage = self.make_stage()
        with ended(self.rig(stage)) as rig:
            rig.submit("r", PROMPTS["r1"], 60, {stage.name: self.feature()})
            known = []
            for _ in range(4):
                for _ in range(3):
                    rig.step()
                if rig.reqs["r"].finished:
                    pytest.skip("its requests end with their prompts")
                rig.scheduler.planner.retract(rig.reqs["r"])
                known.append(holds(stage, "r"))
            rig.run()
            assert known[-1] <= known[0], f"it holds a request that arrived once {known} times after each retraction"

    def test_clip_answers_within_what_it_is_asked(self) -> None:
        stage = self.make_stage()
        if type(stage).clip is Stage.clip:
            pytest.skip("it does not clip")
        with ended(self.rig(stage)) as rig:
            rig.submit("r", PROMPTS["r4"], LENGTH, {stage.name: self.feature()})
            req, before = rig.reqs["r"], size(stage)
            for take in range(1, req.input_len + 1):
                start = req.input_len - take
                found = stage.clip(req, start, take)
                fits = isinstance(found, Wait) or 0 <= found <= take
                assert fits, f"clip(req, {start}, {take}) answers {found!r}: from 0 to {take}, or a Wait"
                assert stage.clip(req, start, take) == found, "clip() answers something else when it is asked again"
            stage.begin_plan()  # what was noted for one plan ends with it
            assert size(stage) == before, "clip() keeps something; it is asked for requests that are not admitted, too"

    def test_what_it_skips_its_clip_skips(self) -> None:
        """In the same plan, whichever is asked first; and it keeps nothing of requests that have ended."""
        stage = self.make_stage()
        if type(stage).skips is Stage.skips:
            pytest.skip("it skips no request before a prefix is looked for")
        with ended(self.rig(stage)) as rig:
            for number in range(7):
                rig.submit(f"s{number}", [number, *PROMPTS["r1"]], LENGTH, {stage.name: self.feature()})
            for _ in range(3):
                rig.step()
                stage.begin_plan()
                waiting = list(rig.scheduler.waiting)
                for req in [*waiting, *reversed(waiting)]:
                    skips, found = stage.skips(req), stage.clip(req, 0, req.seq_len)
                    assert not skips or found is Wait.SKIP, f"skips() answers True, and clip() {found!r}"
                stage.begin_plan()
            rig.run()
            lacking = [rid for rid in rig.outputs if len(rig.tokens(rid)) < LENGTH]
            assert not lacking, f"requests {lacking} have not got all of their tokens"
            assert not any(holds(stage, rid) for rid in rig.outputs), "skips() keeps requests that have ended"

    def test_memory_that_is_short_comes_back(self) -> None:
        """Where clip() answers SHORT for a request, it does so no more once all others have given theirs up."""
        stage = self.make_stage()
        if type(stage).clip is Stage.clip:
            pytest.skip("it does not clip")
        with ended(self.rig(stage)) as rig:
            for number in range(7):
                rig.submit(f"s{number}", [number, *PROMPTS["r1"]], 40, {stage.name: self.feature()})
            for _ in range(12):
                rig.step()
            planner, waiting = rig.scheduler.planner, list(rig.scheduler.waiting)
            stage.begin_plan()
            short = next((req for req in waiting if stage.clip(req, 0, req.seq_len) is Wait.SHORT), None)
            if short is None:
                pytest.skip("it has room for all requests of this test, or no memory of its own")
            for req in [*planner.running.reqs, *([] if planner.chunked is None else [planner.chunked])]:
                planner.retract(req)
            stage.begin_plan()
            found = stage.clip(short, 0, short.seq_len)
            assert found is not Wait.SHORT, "clip() answers SHORT while no request has memory"
            rig.run()
            lacking = [rid for rid in rig.outputs if len(rig.tokens(rid)) < 40]
            assert not lacking, f"requests {lacking} have not got all of their tokens"

    def test_bound_ahead_answers_within_what_it_is_asked(self) -> None:
        stage = self.make_stage()
        if type(stage).bound_ahead is Stage.bound_ahead:
            pytest.skip("it bounds no tokens ahead")
        with ended(self.rig(stage)) as rig:
            self.submit_all(rig)
            for _ in range(3):
                rig.step()
            reqs = [req for req in rig.scheduler.running.reqs if req.flags & stage.flag]
            assert reqs, "none of its requests runs"
            for nodes in (2, 5, 64):
                stage.begin_plan()
                before, most = size(stage), np.full(len(reqs), nodes, np.int64)
                found = stage.bound_ahead(reqs, most.copy())
                fits = found.shape == most.shape and bool(((found >= 1) & (found <= most)).all())
                assert fits, f"bound_ahead(reqs, {most}) answers {found}: for each request from 1 to what it is asked"
                stage.begin_plan()
                assert size(stage) == before, "bound_ahead() keeps something beyond the plan"
            rig.run()

    def test_resumable_answers_within_what_it_is_asked(self) -> None:
        """And what it answers it answers again, for the shorter prefix, since that is what the cache is asked for."""
        stage = self.make_stage()
        if type(stage).resumable is Stage.resumable:
            pytest.skip("it goes on behind any cached prefix")
        with ended(self.rig(stage)) as rig:
            asked = {stage.name: self.feature()}
            rig.submit("before", PROMPTS["r4"], LENGTH, asked)
            rig.run()
            rig.submit("r", PROMPTS["r4"], LENGTH, asked)
            req = rig.reqs["r"]
            for length in range(1, req.input_len):
                stage.begin_plan()
                before, found = size(stage), stage.resumable(req, length)
                assert 0 <= found <= length, f"resumable(req, {length}) answers {found}: from 0 to {length}"
                again = stage.resumable(req, found) if found else 0
                assert again == found, f"resumable(req, {length}) answers {found}, and of {found} tokens {again}"
                stage.begin_plan()
                assert size(stage) == before, "resumable() keeps something beyond the plan"
            rig.run()
            assert rig.tokens("r") == rig.tokens("before"), "behind a cached prefix the answer is another one"

    def test_what_ends_a_text_is_told_in_time(self) -> None:
        """Nothing that has been shown belongs to a match, and nothing of a match that was ignored to a later one."""
        stage = self.make_stage()
        if type(stage).compile_stops is Stage.compile_stops:
            pytest.skip("it ends no text")
        sampling, text = self.ended_text()
        compiled = stage.compile_stops(sampling)
        assert compiled is not None, "compile_stops() answers None for the parameters of ended_text()"
        assert stage.compile_stops(sampling) is compiled, "compile_stops() of equal parameters gives another object"
        assert min(compiled.steps, compiled.chars) > 0, "it costs nothing"
        matcher = compiled.matcher()
        shown = fresh = matches = 0
        for at, char in enumerate(text):
            for end, find in ((at, matcher.before), (at + 1, matcher.read)):
                while fresh <= at and (found := find(char)) is not None:
                    start = end - found[0]
                    assert fresh <= start < end, f"a match from {start} to {end}, where the text begins at {fresh}"
                    assert shown <= start, f"a match from {start} to {end}, of which {shown - start} were not held back"
                    matcher.restart()
                    fresh, matches = end, matches + 1
            most = at + 1 - fresh
            assert 0 <= matcher.undecided <= most, f"{matcher.undecided} of {most} characters are undecided"
            shown = at + 1 - matcher.undecided
        assert matches > 1, "the text of ended_text() has to end twice at least"

    def test_what_it_sent_elsewhere_is_adopted(self) -> None:
        """With the first token of a request: the row that came with it is sent on; where none came, none is missing."""
        stage, prompt = self.make_stage(), PROMPTS["r1"]
        if type(stage).adopt is Stage.adopt:
            pytest.skip("it adopts nothing")
        asked = {stage.name: self.feature()}
        with ended(self.rig(stage)) as there:
            there.submit("a", prompt, LENGTH, asked)
            there.run()
        if not (sent := there.rows("a", stage.name)):
            pytest.skip("it sends no rows")
        lender = Lender()
        with ended(StageRig([self.make_stage(), lender], self.compute)) as rig:
            for rid, rows in (("with", {stage.name: bytes(sent[0])}), ("without", {})):
                rig.submit(rid, prompt, LENGTH, asked)
                rig.begin_computed(lender.core, rid, there.tokens("a")[0], rows)
            rig.run()
            for rid in ("with", "without"):
                assert rig.tokens(rid) == there.tokens("a"), (
                    f"adopt() fails a request {rid} a row, or its tokens are others"
                )
            found = rig.rows("with", stage.name)
            assert found == sent, "what was adopted is not sent on, or rows after it are others"

    # ---- what they share -------------------------------------------------------------------------------------------

    def submit_all(self, rig: StageRig, suffix: str = "") -> None:
        """All prompts; every second request asks for the stage."""
        (stage,) = rig.components.points.stages
        for number, (rid, prompt) in enumerate(PROMPTS.items()):
            rig.submit(rid + suffix, prompt, LENGTH, {} if number % 2 else {stage.name: self.feature()})

    def play(self, rig: StageRig, stage: Stage, number: int) -> int:
        """Submit, abort some on the way, and end; the entries that the stage keeps then."""
        self.submit_all(rig, f"-{number}")
        rig.abort(f"r4-{number}")
        for _ in range(2 + number):
            rig.step()
        rig.abort(f"r2-{number}")
        rig.run()
        return size(stage)


class Lender(Stage):
    """Lends what the core offers stages."""

    name = "suite_lender"
    core: CoreServices

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        self.core = core
        return ()


class ended:  # noqa: N801 - reads as a function
    """Closes a rig when its test is through."""

    def __init__(self, rig: StageRig) -> None:
        self._rig = rig

    def __enter__(self) -> StageRig:
        return self._rig

    def __exit__(self, *_: object) -> None:
        self._rig.close()


def _failed(reason: Mapping[str, Any] | None) -> bool:
    return reason is not None and reason["type"] == "abort" and reason.get("status") == 500


def _state(req: Req) -> tuple[object, ...]:
    kv = req.kv
    return (
        req.tokens.view().tolist(), req.status, req.flags, req.samples, copy.copy(kv), req.output.sent_len,
        req.sampling, req.reusable,
    )  # fmt: skip


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _no_provider(contract: object, ctx: object) -> Any:
    raise LookupError("the suite chooses no providers; give stage_context a `provider`")


def _nothing_ends(req: Req, reason: object) -> None:
    raise AssertionError(f"the stage ends {req.rid}: {reason}")
