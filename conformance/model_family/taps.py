"""The suite of ModelFamily: states that are read on their way through a network, and its embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import TOLERANCE, ModelSuite
from pegboard.conformance.model_family.overlay import prepared, seen
from pegboard.conformance.rig.model_references import overlaid_states, prompts, reference_states, transformers_model
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, Taps


class TapTests(ModelSuite):
    """Compared with transformers, whose layers hooks listen to."""

    @capability("taps")
    def test_states_of_every_place(self, architecture: str, checkpoint: Path) -> None:
        """In a ragged batch; the last place is what the network returns."""
        run = self._run(checkpoint)
        batch = tapped(run, dict(enumerate(prompts(checkpoint))))
        with torch.inference_mode():
            hidden = run.network.forward(batch)
        check_states(batch, torch.cat([states_of(checkpoint, one) for one in range(3)], dim=1))
        assert torch.equal(joined(batch)[:, -hidden.shape[1] :], hidden)

    @capability("taps")
    def test_states_stay_as_they_are(self, architecture: str, checkpoint: Path) -> None:
        """Whatever runs afterwards: here chunks and decodes, which have states of their own."""
        run, (long, middle, short) = self._run(checkpoint), prompts(checkpoint)
        steps = ({0: long[:30], 1: middle[:-1]}, {0: long[30:], 1: middle[-1:], 2: short[:-1]}, {2: short[-1:]})
        parts = (((0, 0, 30), (1, 0, -1)), ((0, 30, None), (1, -1, None), (2, 0, -1)), ((2, -1, None),))
        batches = []
        for index, new in enumerate(steps):
            batches.append(tapped(run, new, decode=index == 2))
            with torch.inference_mode():
                run.network.forward(batches[-1])
        for batch, part in zip(batches, parts, strict=True):
            expected = [states_of(checkpoint, one)[:, start:stop] for one, start, stop in part]
            check_states(batch, torch.cat(expected, dim=1))

    @capability("taps")
    def test_states_of_parts(self, architecture: str, checkpoint: Path) -> None:
        """Another batch, with taps of its own, runs in every pause."""
        family, network = self._load(checkpoint)
        run, other = PagedRun(network, family.spec), PagedRun(network, family.spec)
        batch, others = tapped(run, {0: prompts(checkpoint)[0], 1: prompts(checkpoint)[2]}), []
        with torch.inference_mode():
            for _ in network.forward_in_parts(batch):
                other.tokens[0].clear()
                others.append(tapped(other, {0: prompts(checkpoint)[1]}))
                network.forward(others[-1])
        check_states(batch, torch.cat([states_of(checkpoint, one) for one in (0, 2)], dim=1))
        for one in others:
            check_states(one, states_of(checkpoint, 1))

    @capability("taps")
    @capability("overlay")
    def test_states_under_an_overlay(self, architecture: str, checkpoint: Path) -> None:
        """Given states stand in for embeddings, and deep ones are a part of what the next layer reads."""
        run = self._run(checkpoint)
        batch = prepared(run, dict(enumerate(seen(run, checkpoint))))
        batch.taps = Taps(places(run))
        with torch.inference_mode():
            run.network.forward(batch)
        theirs = transformers_model(checkpoint)
        expected = [overlaid_states(theirs, prompt) for prompt in seen(run, checkpoint)]
        check_states(batch, torch.cat(expected, dim=1))

    @capability("taps")
    def test_taps_change_nothing(self, architecture: str, checkpoint: Path) -> None:
        """Not a bit of what the network returns, with taps or after them."""
        run, new = self._run(checkpoint), dict(enumerate(prompts(checkpoint)))
        found = []
        for taps in (None, Taps(places(run)), None):
            for tokens in run.tokens:
                tokens.clear()
            batch = tapped(run, new)
            batch.taps = taps
            with torch.inference_mode():
                found.append(run.network.forward(batch))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    @capability("taps")
    def test_embeddings(self, architecture: str, checkpoint: Path) -> None:
        """As they enter the first layer; of ids in any order, and of none."""
        family, network = self._load(checkpoint)
        prompt = prompts(checkpoint)[0]
        embeddings = network.embed(torch.tensor(prompt + prompt[3:5]))
        expected = states_of(checkpoint, 0)[0]
        assert embeddings.dtype == torch.float32
        torch.testing.assert_close(embeddings, torch.cat([expected, expected[3:5]]))
        assert network.embed(torch.empty(0, dtype=torch.int64)).shape == (0, family.spec.hidden_size)

    @lacks("taps")
    def test_taps_are_refused(self, architecture: str, checkpoint: Path) -> None:
        run = self._run(checkpoint)
        batch = tapped(run, {0: prompts(checkpoint)[2]})
        with pytest.raises(Unsupported, match="taps"), torch.inference_mode():
            run.network.forward(batch)
        with pytest.raises(Unsupported, match="taps"):
            run.network.embed(torch.tensor([1]))


def places(run: PagedRun) -> tuple[int, ...]:
    """Return all places that a network has: layers that only keep states count, too."""
    layers = {state.name.rpartition(".layers.")[2].partition(".")[0] for state in run.spec.states}
    return tuple(range(len(run.spec.layers) + len(layers) + 2))


def tapped(run: PagedRun, new: Mapping[int, Sequence[int]], *, decode: bool = False) -> ForwardBatch:
    """Return a batch that is prepared and shows the states of all places."""
    batch = run.batch(new, decode=decode)
    batch.taps = Taps(places(run))
    run.attention.prepare(batch)
    return batch


def states_of(checkpoint: Path, number: int) -> torch.Tensor:
    """Return transformers' states [places, len, hidden] of one of the prompts."""
    return reference_states(checkpoint, tuple(prompts(checkpoint)[number]))


def joined(batch: ForwardBatch) -> torch.Tensor:
    assert batch.taps is not None
    return batch.taps.joined()


def check_states(batch: ForwardBatch, expected: torch.Tensor) -> None:
    """Check the states at all places, of which `expected` are [places, tokens, hidden]."""
    __tracebackhide__ = True
    found, (count, tokens, hidden) = joined(batch), expected.shape
    assert found.shape == (tokens, count * hidden)
    for place, ours, theirs in zip(range(count), torch.split(found, hidden, dim=1), expected, strict=True):
        error = float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())
        assert error <= TOLERANCE, f"states at place {place} are off by {error:.3g} relative"
