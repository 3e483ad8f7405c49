"""The suite of ModelRunner: states in place of tokens' embeddings, and positions of three axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pegboard.conformance.model_runner.base import RunnerModel, RunnerSuite
from pegboard.conformance.rig.model_references import (
    OverlaidPrompt,
    overlaid_logits,
    overlaid_prompts,
    transformers_model,
)
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported


class RunnerOverlayTests(RunnerSuite):
    """Compared with transformers, to whose layers' outputs hooks add deep states."""

    @capability("overlay")
    def test_states_take_the_place_of_embeddings(self) -> None:
        """And deep ones join the first layers; of several requests in one batch, one of which has none."""
        model = self.make_model()
        found = self.rig().overlaid(dict(enumerate(seen(model))))
        self.check_greedy(found, last_logits(model, seen(model)))
        found = self.rig().overlaid(dict(enumerate(prompt.flat() for prompt in seen(model))))
        self.check_greedy(found, last_logits(model, [prompt.flat() for prompt in seen(model)]))

    @capability("overlay")
    def test_an_overlay_may_be_cut(self) -> None:
        """Chunks begin and end among its rows; a request that decodes stands before them in their batches."""
        model = self.make_model()
        rig, (long, middle, short) = self.rig(), seen(model)
        rig.overlaid({1: middle.part(0, 18)}, None)
        cuts = [0, 7, 20, 45, len(long.tokens)]
        for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
            other = middle.part(18 + index, 19 + index) if index < 3 else short
            found = rig.overlaid({1 if index < 3 else 2: other, 0: long.part(start, stop)}, sampled=[0])
        self.check_greedy(found, last_logits(model, [long]))

    @capability("overlay")
    def test_an_overlay_leaves_nothing_behind(self) -> None:
        model = self.make_model()
        rig, prompt = self.rig(), seen(model)[1]
        rig.overlaid({0: prompt})
        found = rig.step({1: prompt.tokens}, return_logits=True)
        self.check_greedy(found, self.expected(prompt.tokens)[-1:])

    @capability("overlay")
    def test_an_overlay_in_parts(self) -> None:
        """Another batch, with an overlay of its own, runs in the first pause. What is decoded afterwards sees whether
        the keys and values are right.
        """
        model = self.make_model()
        (long, middle, short), rig, whole = seen(model), self.rig(), self.rig()
        parts, begun = rig.overlaid_in_parts({0: long, 2: short}), False
        while True:
            try:
                next(parts)
            except StopIteration as end:
                tokens = end.value.next_token_ids.tolist()
                break
            if not begun:
                rig.overlaid({1: middle})
                begun = True
        at_once = whole.overlaid({0: long, 2: short})
        self.check_tokens(at_once.next_token_ids, tokens)
        self.check_greedy(at_once, last_logits(model, [long, short]))
        new, positions = dict(zip((0, 2), tokens, strict=True)), [len(long.tokens), len(short.tokens)]
        again = whole.decode_at(new, positions)
        assert again.logits is not None
        self.check_greedy(rig.decode_at(new, positions), again.logits)

    @lacks("overlay")
    def test_an_overlay_is_refused(self) -> None:
        with pytest.raises(Unsupported, match="overlay"):
            self.rig().overlaid({0: seen(self.make_model())[1]})

    # Positions of three axes.

    @capability("overlay")
    def test_each_frequency_has_its_axis(self) -> None:
        model = self.make_tower()
        prompts = seen(model)
        expected = last_logits(model, prompts)
        self.check_greedy(self.rig(model=model).overlaid(dict(enumerate(prompts))), expected)
        for axes in ([0, 0, 0], [0, 2, 1], [1, 0, 2]):
            others = [replace(prompt, positions=prompt.positions[axes]) for prompt in prompts]
            error = (last_logits(model, others) - expected).abs().amax() / expected.abs().amax()
            assert float(error) > 2 * self.tolerance, "these prompts show nothing"

    @capability("overlay")
    def test_equal_axes_are_plain_positions(self) -> None:
        model = self.make_tower()
        prompt = seen(model)[0]
        rig, plain = self.rig(model=model), torch.arange(len(prompt.tokens))
        found = rig.overlaid({0: replace(prompt, positions=plain.expand(3, -1))})
        again = rig.overlaid({1: replace(prompt, positions=plain)})
        assert found.logits is not None
        assert again.logits is not None
        assert torch.equal(found.logits, again.logits)

    @capability("overlay")
    def test_decodes_go_on_from_their_own_positions(self) -> None:
        """After a prompt with media a token's position is not its index."""
        model = self.make_tower()
        prompt, rig, delta = seen(model)[0], self.rig(model=model), -9
        first = len(prompt.tokens) - 3
        positions = prompt.positions.clone()
        positions[:, first:] = torch.arange(first, len(prompt.tokens)) + delta
        text = prompt.part(0, first)
        whole = OverlaidPrompt(prompt.tokens, text.rows, text.states, text.deep, positions)
        expected = overlaid_logits(transformers_model(model.model.directory), whole)
        rig.overlaid({0: text}, None)
        for index in range(first, len(prompt.tokens)):
            found = rig.decode_at({0: prompt.tokens[index]}, [index + delta])
            self.check_greedy(found, expected[index : index + 1])


def seen(model: RunnerModel) -> Sequence[OverlaidPrompt]:
    return overlaid_prompts(model.model.directory, model.spec.position_axes)


def last_logits(model: RunnerModel, prompts: Sequence[OverlaidPrompt]) -> torch.Tensor:
    """Return the logits float32 [n, vocab] after the last token of each prompt."""
    theirs = transformers_model(model.model.directory)
    return torch.stack([overlaid_logits(theirs, prompt)[-1] for prompt in prompts])
