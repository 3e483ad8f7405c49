"""The suite of ModelRunner: states that are read on their way through the model, and its embedding and head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from pegboard.conformance.model_runner.base import RunnerSuite, reference
from pegboard.conformance.model_runner.overlay import seen
from pegboard.conformance.model_runner.trees import BUSH
from pegboard.conformance.rig.model_references import overlaid_states, reference_states, transformers_model
from pegboard.conformance.rig.tails import path
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardOutput, Taps
from pegboard.core.interfaces.model_runner import ModelEnds


class RunnerTapTests(RunnerSuite):
    """States are compared with those of transformers, whose layers hooks listen to."""

    @capability("taps")
    def test_states_of_every_place(self, prompts: list[list[int]]) -> None:
        """Of all tokens, whichever row is sampled."""
        rig, order = self.rig(), (2, 0, 1)
        taps = rig.tap(self.places())
        rig.step({one: prompts[one] for one in order}, sampled=[0])
        expected = torch.cat([self.states(prompts[one]) for one in order], dim=1)
        for before, after in itertools.pairwise(expected):
            assert self.state_error(before, after) > 4 * self.tolerance, "these prompts show nothing"
        self.check_states(taps, expected)

    @capability("taps")
    def test_states_come_in_the_order_of_the_places(self, prompts: list[list[int]]) -> None:
        """And those alone that are wanted."""
        last = self.places()[-1]
        for places in ((last, 0, 2), (1,), (last - 1,)):
            rig = self.rig()
            taps = rig.tap(places)
            rig.step({0: prompts[1]}, None)
            self.check_states(taps, self.states(prompts[1])[list(places)])

    @capability("taps")
    def test_states_of_chunks_and_decodes(self, prompts: list[list[int]]) -> None:
        """Chunks that sample nothing, then the rest of one with a decode and a new prompt, then decodes alone."""
        rig, (long, middle, short) = self.rig(), prompts
        taps = rig.tap(self.places())
        rig.step({0: long[:10], 1: middle[:-2]}, None)
        self.check_states(taps, self.part((long, 0, 10), (middle, 0, -2)))
        taps = rig.tap(self.places())
        rig.step({0: long[10:-1], 1: middle[-2:-1], 2: short[:-1]}, sampled=[1])
        self.check_states(taps, self.part((long, 10, -1), (middle, -2, -1), (short, 0, -1)))
        taps = rig.tap(self.places())
        rig.step({one: prompts[one][-1:] for one in (2, 0, 1)}, decode=True)
        self.check_states(taps, self.part(*((prompts[one], -1, None) for one in (2, 0, 1))))

    @capability("taps")
    def test_states_of_trees(self, prompts: list[list[int]]) -> None:
        """Beside a request that decodes: what a node gets is what its path gets in a row."""
        if {"own_attention", "tree_mask"} & self.capabilities == {"own_attention"}:
            pytest.skip("it computes attention itself, and knows no trees")
        rig, tokens = self.rig(), prompts[1][:10]
        rig.step({0: prompts[0][:17], 1: prompts[2][:-1]}, None)
        taps = rig.tap(self.places())
        rig.run_trees({1: prompts[2][-1:], 0: tokens}, {0: BUSH})
        nodes = [prompts[0][:17] + [tokens[one] for one in path(BUSH, node)] for node in range(10)]
        self.check_states(taps, torch.stack([self.states(one)[:, -1] for one in (prompts[2], *nodes)], dim=1))

    @capability("taps")
    @capability("overlay")
    def test_states_under_an_overlay(self) -> None:
        """Given states stand in for embeddings, and deep ones are a part of what the next layer reads."""
        model, rig = self.make_model(), self.rig()
        taps = rig.tap(self.places())
        rig.overlaid(dict(enumerate(seen(model))))
        theirs = transformers_model(model.model.directory)
        self.check_states(taps, torch.cat([overlaid_states(theirs, prompt) for prompt in seen(model)], dim=1))

    @capability("taps")
    def test_taps_change_nothing(self, prompts: list[list[int]]) -> None:
        """Neither logits nor tokens, not a bit, then or later."""
        rig, plain, new = self.rig(), self.rig(), dict(enumerate(prompts))
        rig.tap(self.places())
        found, expected = rig.step(new), plain.step(new)
        self.check_tokens(found.next_token_ids, expected.next_token_ids.tolist())
        new = {one: [token] for one, token in enumerate(expected.next_token_ids.tolist())}
        rig.tap(self.places())
        found = rig.step(new, decode=True, return_logits=True)
        expected = plain.step(new, decode=True, return_logits=True)
        assert found.logits is not None
        assert expected.logits is not None
        assert torch.equal(found.logits, expected.logits)

    @capability("taps")
    def test_states_stay_as_they_are(self, prompts: list[list[int]]) -> None:
        """Whatever runs afterwards, with taps or without, and whichever way it is sampled."""
        rig = self.rig()
        taps = rig.tap(self.places())
        rig.step({0: prompts[0][:-1], 1: prompts[1]}, return_logits=True)
        before = taps.joined().clone()
        rig.step({2: prompts[2], 3: prompts[0]})
        rig.tap(self.places())
        rig.step({0: prompts[0][-1:]}, [{"temperature": 1.0, "seed": 1}], decode=True)
        assert torch.equal(taps.joined(), before)

    @capability("taps")
    def test_states_of_parts(self, prompts: list[list[int]]) -> None:
        """Another batch, with taps of its own, runs in every pause."""
        rig = self.rig()
        taps = rig.tap(self.places())
        for done, _ in enumerate(rig.in_parts({0: prompts[0], 2: prompts[2]})):
            own = rig.tap(self.places())
            rig.step({1: prompts[1][done : done + 1]}, None)
            self.check_states(own, self.part((prompts[1], done, done + 1)))
        self.check_states(taps, self.part((prompts[0], 0, None), (prompts[2], 0, None)))

    @lacks("taps")
    def test_taps_are_refused(self, prompts: list[list[int]]) -> None:
        rig = self.rig()
        rig.tap((0,))
        with pytest.raises(Unsupported, match="taps"):
            rig.step({0: prompts[0]})

    # Both ends.

    @capability("ends")
    def test_the_embedding_is_lent(self, prompts: list[list[int]]) -> None:
        """In the model's dtype, of any ids in any order, and of none."""
        embed, dtype = self.rig().runner.ends().embed, self.make_model().model.dtype
        ids = torch.tensor(prompts[0] + prompts[0][3:5])
        expected = torch.cat([self.states(prompts[0])[0], self.states(prompts[0])[0, 3:5]])
        torch.testing.assert_close(embed(ids), expected.to(dtype))
        assert embed(ids[:0]).shape == (0, expected.shape[1])
        assert embed(ids[:0]).dtype == dtype

    @capability("ends")
    def test_the_head_is_lent(self, prompts: list[list[int]]) -> None:
        """Of states after the final norm, in the model's dtype. What it returns is the caller's to change."""
        logits, model = self.rig().runner.ends().logits, self.make_model()
        states = torch.cat([reference(model.model.directory, tuple(prompt))[1] for prompt in prompts])
        states = states.to(model.model.dtype)
        expected = torch.cat([self.expected(prompt) for prompt in prompts])
        found = logits(states)
        self.check_logits(found, expected)
        kept = found.clone()
        self.check_logits(logits(states[[9, 3]]), expected[[9, 3]])
        self.check_logits(logits(states[-1:]), expected[-1:])
        assert torch.equal(found, kept), "a later call has changed what an earlier one returned"
        with torch.inference_mode():
            found.fill_(torch.nan)
        assert torch.equal(logits(states), kept), "the caller's change is seen by the next call"
        assert logits(states[:0]).shape == (0, expected.shape[1])

    @capability("ends")
    @capability("taps")
    def test_logits_of_tapped_states(self, prompts: list[list[int]]) -> None:
        """Those of the pass, up to the order of sums."""
        rig = self.rig()
        taps = rig.tap(self.places()[-1:])
        output = rig.step(dict(enumerate(prompts)), return_logits=True)
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        found = rig.runner.ends().logits(taps.joined()[ends])
        assert output.logits is not None
        error = (found - output.logits).abs().max() / output.logits.abs().max()
        assert float(error) <= min(self.tolerance, 1e-3), f"logits are off by {float(error):.3g} relative"

    @capability("ends")
    def test_both_are_used_between_passes(self, prompts: list[list[int]]) -> None:
        """Between chunks, in the pauses, and before a decode: what the model does there is not disturbed."""
        rig = self.rig()
        ends = rig.runner.ends()
        rig.step({0: prompts[0][:9]}, None)
        self.use(ends, prompts)
        self.check_greedy(rig.step({0: prompts[0][9:]}, return_logits=True), self.expected(prompts[0])[-1:])
        parts = rig.in_parts({1: prompts[1][:-1]})
        while True:
            self.use(ends, prompts)
            try:
                next(parts)
            except StopIteration as end:
                output: ForwardOutput = end.value
                break
        assert len(output.next_token_ids) == 1
        found = rig.step({1: prompts[1][-1:]}, decode=True, return_logits=True)
        self.check_greedy(found, self.expected(prompts[1])[-1:])

    @lacks("ends")
    def test_ends_are_refused(self) -> None:
        with pytest.raises(Unsupported, match="ends"):
            self.rig().runner.ends()

    # What the tests above use.

    def use(self, ends: ModelEnds, prompts: list[list[int]]) -> None:
        ends.logits(ends.embed(torch.tensor(prompts[0])))

    def places(self) -> tuple[int, ...]:
        """Return all places that the model has."""
        return tuple(range(len(self.make_model().spec.layers) + 2))

    def states(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return transformers' states float32 [places, len, hidden]."""
        return reference_states(self.make_model().model.directory, tuple(prompt))

    def part(self, *parts: tuple[list[int], int, int | None]) -> torch.Tensor:
        """Return transformers' states of the tokens from `start` to `stop` of some prompts."""
        return torch.cat([self.states(prompt)[:, start:stop] for prompt, start, stop in parts], dim=1)

    def state_error(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """Return the largest error of states [n, hidden], relative to the largest number of their token."""
        return float(((found.float() - expected).abs().amax(-1) / expected.abs().amax(-1)).max())

    def check_states(self, taps: Taps, expected: torch.Tensor) -> None:
        """Check the states at all places of `taps`; `expected` are [places, tokens, hidden]. They may be off by twice
        what a logit may, for which many of their numbers are summed.
        """
        __tracebackhide__ = True
        found, (places, tokens, hidden) = taps.joined(), expected.shape
        dtype = self.make_model().model.dtype
        assert found.dtype == dtype, f"states are {found.dtype}, not {dtype}"
        assert found.shape == (tokens, places * hidden)
        for place, ours, theirs in zip(taps.places, torch.split(found, hidden, dim=1), expected, strict=True):
            error = self.state_error(ours, theirs)
            assert error <= 2 * self.tolerance, f"states at place {place} are off by {error:.3g} relative"
