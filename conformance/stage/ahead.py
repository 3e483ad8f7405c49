"""The conformance suite of stages that bring tokens ahead, and of device parts that say which of them stand.

A class says how to make the stage, and its part where it has one. Where requests have to ask for it, or it has nothing
ahead of the prompts of this suite, it overrides `submit` as well::

    class TestMyTokensAhead(AheadContract):
        def make_stage(self) -> Stage:
            return MyStage(stage_context())

        def make_part(self) -> DevicePart:
            return MyPart()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pegboard.conformance.stage.rig import VOCAB, Parts, StageRig
from pegboard.core.interfaces.ahead import AheadRoom, LogPart, Verified, Wants
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.interfaces.stage import DevicePart, Stage
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.trees import TokenTrees

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
PROMPTS = {f"r{n}": [(n * 7 + i) % 250 for i in range(5 + 9 * n)] for n in range(4)}
LENGTH = 24
FORBIDDEN = slice(0, VOCAB, 3)
"""Tokens that the logits of this suite rule out."""


class AheadContract:
    """What is ahead of requests is a tree of tokens for each, costs no request a token, and no other its memory."""

    def make_stage(self) -> Stage:
        """Return a new stage. Override."""
        raise NotImplementedError("say how to make the stage: override make_stage")

    def make_part(self) -> DevicePart | None:
        """Return a new part of it; None where it has none that takes part in batches."""
        return None

    def submit(self, rig: StageRig, rid: str) -> None:
        """Send one of the requests PROMPTS."""
        rig.submit(rid, PROMPTS[rid], LENGTH, {})

    # ---- the tests -------------------------------------------------------------------------------------------------

    @LOOPS
    def test_it_brings_trees_within_their_room(self, loop: str) -> None:
        """In the overlap loop, too, where it has to ask for the newest tokens first."""
        stage = self.make_stage()
        brought, faults, ahead = 0, [], type(stage).ahead

        def watched(room: AheadRoom) -> TokenTrees | None:
            nonlocal brought
            before, newest, most = [_state(req) for req in room.reqs], room.newest.copy(), room.most.copy()
            found = ahead(stage, room)
            if [_state(req) for req in room.reqs] != before:
                faults.append("ahead() has changed a request")
            if (room.most != most).any():
                faults.append("ahead() has changed what there is room for")
            if found is not None and (wrong := tree.fault(found, newest, most, VOCAB)) is not None:
                faults.append(f"ahead() does not answer with trees: {wrong}")
            brought += 0 if found is None else int((found.counts > 1).sum())
            return found

        vars(stage)["ahead"] = watched
        rig = self.play(stage, loop)
        assert not faults, faults[0]
        told = [out.finish_reason for outs in rig.outputs.values() for out in outs if out.finish_reason is not None]
        assert brought, (
            "it brings nothing ahead of the requests of this suite: override submit"
            if loop == "normal"
            else "it brings nothing in the overlap loop: must_settle() has to say that it needs the newest tokens"
        )
        assert all(reason["type"] == "length" for reason in told), f"requests failed: {told}"

    @LOOPS
    @pytest.mark.parametrize("tokens", [512, 96])
    def test_no_token_changes(self, loop: str, tokens: int) -> None:
        """Where memory is short, too."""
        plain, rig = self.play(None, loop, tokens), self.play(self.make_stage(), loop, tokens)
        for rid in PROMPTS:
            assert rig.tokens(rid) == plain.tokens(rid), "answers are others than those without tokens ahead"
        assert not rig.scheduler.counters.failed_batches, "a batch failed; the log says why"

    def test_what_it_tells_are_figures_of_its_own(self) -> None:
        stage = self.make_stage()
        if type(stage).figures is Stage.figures:
            pytest.skip("it tells none")
        rig = self.play(stage, "normal")
        figures = stage.figures()
        assert all(isinstance(value, int | float) for value in figures.values()), f"figures are numbers: {figures}"
        taken = rig.scheduler.counters.to_dict().keys() & figures.keys()
        assert not taken, f"the scheduler has figures of these names: {sorted(taken)}"
        assert isinstance(stage.log_decodes(), LogPart | None), "log_decodes() answers with a LogPart, or None"

    def test_what_its_part_accepts_are_paths(self) -> None:
        """Of each tree, by tokens that the logits allow, and the same again."""
        part, stage = self.make_part(), self.make_stage()
        if part is None or type(part).accept is DevicePart.accept:
            pytest.skip("what was drawn decides")
        asked: list[bool] = []

        def accept(payload: object, work: ModelWorkerBatch) -> Parts:
            if work.trees is not None:
                asked.append(self._accepts(part, payload, work))
            return {}

        self.play(stage, "normal", compute=accept)
        assert any(asked), "it was never asked what stands, or never said so"

    def test_its_part_wants_the_same_again(self) -> None:
        part = self.make_part()
        if part is None or type(part).wants is DevicePart.wants:
            pytest.skip("it reads nothing of a pass")
        wanted: list[Wants] = []

        def wants(payload: object, work: ModelWorkerBatch) -> Parts:
            found = part.wants(payload)
            assert isinstance(found, Wants), f"wants() answers {found!r}"
            assert part.wants(payload) == found, "wants() of the same payload answers something else"
            assert all(place >= 0 for place in found.states), f"states are places from 0 on, not {found.states}"
            wanted.append(found)
            return {}

        self.play(self.make_stage(), "normal", compute=wants)
        assert any(found != Wants() for found in wanted), "it wants nothing of any pass"

    # ---- what they share -------------------------------------------------------------------------------------------

    def play(self, stage: Stage | None, loop: str, tokens: int = 512, compute: Any = None) -> StageRig:
        """Run all requests to their ends, and check the books."""
        failures: list[BaseException] = []

        def computed(payload: object, work: ModelWorkerBatch) -> Parts:
            try:
                return {} if compute is None else compute(payload, work)
            except AssertionError as error:  # the scheduler takes it for a failed batch
                failures.append(error)
                raise

        rig = StageRig([] if stage is None else [stage], computed, loop=loop, tokens=tokens)
        try:
            for rid in PROMPTS:
                if stage is None:
                    rig.submit(rid, PROMPTS[rid], LENGTH, {})
                else:
                    self.submit(rig, rid)
            rig.run()
        finally:
            rig.close()
        if failures:
            raise failures[0]
        assert rig.components.memory.idle_error() is None, "memory is lost"
        return rig

    def _accepts(self, part: DevicePart, payload: object, work: ModelWorkerBatch) -> bool:
        """Ask the part what stands of a batch's trees, and return whether it says so."""
        assert work.trees is not None
        assert work.sampling is not None
        nodes = work.trees.tokens.shape[0]
        logits = torch.randn(nodes, VOCAB, generator=torch.Generator().manual_seed(nodes))
        logits[:, FORBIDDEN] = -torch.inf
        sampling = SamplingBatch.of(
            work.sampling.numbers, torch.from_numpy(work.sampling.steps), VOCAB, torch.from_numpy
        )
        drawn = logits.argmax(1).numpy()
        before = logits.clone()
        answers = []
        for _ in range(2):
            with torch.inference_mode():
                answers.append(part.accept(payload, Verified(work.trees, work.sampled_rows, drawn, logits, sampling)))
        assert torch.equal(logits, before), "accept() has changed the logits"
        found, again = answers
        if found is None or again is None:
            assert found is again, "accept() of the same pass answers something else"
            return False
        wrong = tree.accepted_fault(work.trees, found, VOCAB)
        assert wrong is None, f"what is accepted are no paths: {wrong}"
        assert (logits.numpy()[found.nodes, found.tokens] > -np.inf).all(), "a token is gained that the logits rule out"
        same = (found.nodes.tolist(), found.tokens.tolist()) == (again.nodes.tolist(), again.tokens.tolist())
        assert same, "accept() of the same pass answers something else"
        return True


def _state(req: Req) -> tuple[object, ...]:
    return req.tokens.view().tolist(), req.status, req.flags, req.samples, req.output.sent_len, req.sampling
