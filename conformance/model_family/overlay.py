"""The suite of ModelFamily: states in place of tokens' embeddings, and positions of three axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite, assert_close
from pegboard.conformance.rig.model_references import (
    OverlaidPrompt,
    lay_over,
    overlaid_logits,
    overlaid_prompts,
    text_config,
    transformers_model,
)
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch


class OverlayTests(ModelSuite):
    """Compared with transformers, whose layers hooks add the deep states to."""

    @capability("overlay")
    def test_states_take_the_place_of_embeddings(self, architecture: str, checkpoint: Path) -> None:
        """Of several requests of one batch, one of which has none."""
        run = self._run(checkpoint)
        check(run, checkpoint, dict(enumerate(prompt.flat() for prompt in seen(run, checkpoint))))

    @capability("overlay")
    def test_deep_states_join_the_first_layers(self, architecture: str, checkpoint: Path) -> None:
        run = self._run(checkpoint)
        check(run, checkpoint, dict(enumerate(seen(run, checkpoint))))

    @capability("overlay")
    def test_an_overlay_may_be_cut(self, architecture: str, checkpoint: Path) -> None:
        """Chunks begin and end among its rows, and have their own part of it beside another request's."""
        run = self._run(checkpoint)
        long, middle, _ = seen(run, checkpoint)
        cuts = [0, 7, 20, 45, len(long.tokens)]
        expected = overlaid_logits(transformers_model(checkpoint), long)
        for start, stop in itertools.pairwise(cuts):
            parts = {0: long.part(start, stop)} | ({1: middle} if start == 7 else {})
            assert_close(forward(run, parts)[0], expected[start:stop])

    @capability("overlay")
    def test_an_overlay_leaves_nothing_behind(self, architecture: str, checkpoint: Path) -> None:
        family, network = self._load(checkpoint)
        runs = [PagedRun(network, family.spec) for _ in range(3)]
        prompt = seen(runs[0], checkpoint)[1]
        first = runs[0].step({0: prompt.tokens})[0]
        forward(runs[1], {0: prompt})
        assert torch.equal(first, runs[2].step({0: prompt.tokens})[0])

    @capability("overlay")
    def test_an_overlay_in_parts(self, architecture: str, checkpoint: Path) -> None:
        """Another batch, with an overlay of its own, runs in every pause."""
        family, network = self._load(checkpoint)
        run, other = PagedRun(network, family.spec), PagedRun(network, family.spec)
        long, middle, short = seen(run, checkpoint)
        batch = prepared(run, {0: long, 1: short})
        parts = network.forward_in_parts(batch)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                logits = network.logits(end.value)
                break
            other.tokens[0].clear()
            forward(other, {0: middle})
        expected = [overlaid_logits(transformers_model(checkpoint), prompt) for prompt in (long, short)]
        assert_close(logits, torch.cat(expected))

    @lacks("overlay")
    def test_an_overlay_is_refused(self, architecture: str, checkpoint: Path) -> None:
        run = self._run(checkpoint)
        with pytest.raises(Unsupported, match="overlay"):
            forward(run, {0: seen(run, checkpoint)[1]})

    # Positions of three axes

    @capability("overlay")
    def test_position_axes_match_config(self, architecture: str, checkpoint: Path) -> None:
        assert self._run(checkpoint).spec.position_axes == axes_of(checkpoint)

    @capability("overlay")
    def test_each_frequency_has_its_axis(self, architecture: str, checkpoint: Path) -> None:
        """And with equal axes, or in another order, the logits would be others."""
        run, prompt = self._run_of_axes(checkpoint), overlaid_prompts(checkpoint, 3)[0]
        model = transformers_model(checkpoint)
        expected = overlaid_logits(model, prompt)
        assert_close(forward(run, {0: prompt})[0], expected)
        for axes in ([0, 0, 0], [0, 2, 1], [1, 0, 2]):
            other = OverlaidPrompt(prompt.tokens, prompt.rows, prompt.states, prompt.deep, prompt.positions[axes])
            assert float((overlaid_logits(model, other) - expected).abs().max()) > 1e-2, "these prompts show nothing"

    @capability("overlay")
    def test_equal_axes_are_plain_positions(self, architecture: str, checkpoint: Path) -> None:
        """Bit by bit: a request without media gets no other answer beside one that has some."""
        run = self._run_of_axes(checkpoint)
        tokens = seen(run, checkpoint)[0].tokens
        batch = run.batch({1: tokens})
        batch.positions = batch.positions.expand(3, -1)
        assert torch.equal(logits_of(run, batch), run.step({0: tokens})[0])

    @capability("overlay")
    def test_decodes_go_on_from_their_own_positions(self, architecture: str, checkpoint: Path) -> None:
        """After a prompt with media a token's position is not its index."""
        run, prompt = self._run_of_axes(checkpoint), overlaid_prompts(checkpoint, 3)[0]
        steps, delta = 3, -9
        first = len(prompt.tokens) - steps
        positions = prompt.positions.clone()
        positions[:, first:] = torch.arange(first, len(prompt.tokens)) + delta
        text = prompt.part(0, first)
        whole = OverlaidPrompt(prompt.tokens, text.rows, text.states, text.deep, positions)
        expected = overlaid_logits(transformers_model(checkpoint), whole)
        forward(run, {0: text})
        for index in range(first, len(prompt.tokens)):
            batch = run.batch({0: prompt.tokens[index : index + 1]}, decode=True)
            batch.positions = batch.positions + delta
            assert_close(logits_of(run, batch), expected[index : index + 1])

    def _run_of_axes(self, checkpoint: Path) -> PagedRun:
        run = self._run(checkpoint)
        if run.spec.position_axes == 1:
            pytest.skip("positions of this model have one axis")
        return run


def axes_of(checkpoint: Path) -> int:
    """Return the number of axes by the config: sections of a rope are what says so."""
    text = text_config(checkpoint)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return 3 if "mrope_section" in rope else 1


def seen(run: PagedRun, checkpoint: Path) -> Sequence[OverlaidPrompt]:
    return overlaid_prompts(checkpoint, run.spec.position_axes)


def check(run: PagedRun, checkpoint: Path, new: Mapping[int, OverlaidPrompt]) -> None:
    """Compute prompts as one batch, and compare all their logits."""
    __tracebackhide__ = True
    found = forward(run, new)
    for request, prompt in new.items():
        assert_close(found[request], overlaid_logits(transformers_model(checkpoint), prompt))


def forward(run: PagedRun, new: Mapping[int, OverlaidPrompt]) -> dict[int, torch.Tensor]:
    """Return logits [new, vocab] by request, as `PagedRun.step` does."""
    parts = torch.split(logits_of(run, prepared(run, new)), [len(part.tokens) for part in new.values()])
    return dict(zip(new, parts, strict=True))


def prepared(run: PagedRun, new: Mapping[int, OverlaidPrompt]) -> ForwardBatch:
    batch = run.batch({request: part.tokens for request, part in new.items()})
    lay_over(batch, list(new.values()))
    run.attention.prepare(batch)
    return batch


@torch.inference_mode()
def logits_of(run: PagedRun, batch: ForwardBatch) -> torch.Tensor:
    run.attention.prepare(batch)
    return run.network.logits(run.network.forward(batch))
