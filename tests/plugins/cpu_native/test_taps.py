"""States and ends to the bit: in any number of threads, and as the pass itself rounds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.core.interfaces.forward import EmbedOverlay, Taps
from tests.plugins.cpu_native.instruction_sets import EACH

LENGTHS = (100, 1, 22, 4)
"""More tokens than a block of a product, so that threads share the norm, too."""


class Native(ModelRunnerContract):
    """The suite's models and memory; its tests run elsewhere."""

    __test__ = False
    provider = "cpu_native"
    dtype = "bfloat16"
    checkpoint_settings = {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

    def __init__(self, **options: Any) -> None:
        type(self).options = options


def tapped(kit: Native, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states bf16 [places, tokens, hidden] of a batch, its last hidden states float32 [tokens, hidden], and
    its ids.
    """
    rig = kit.rig()
    draw = torch.Generator().manual_seed(3)
    batch = rig.run.batch(
        {one: torch.randint(0, 320, (length,), generator=draw).tolist() for one, length in enumerate(lengths)}
    )
    batch.taps, batch.hidden_rows = Taps(kit.places()), torch.arange(batch.num_tokens)
    output = rig.runner.execute(batch, None)
    assert output.row_states is not None
    return torch.stack(batch.taps.joined().chunk(len(kit.places()), 1)), output.row_states, batch.input_ids


@pytest.mark.parametrize("instructions", EACH)
def test_in_any_number_of_threads(instructions: str) -> None:
    """States are rounded once, from what the pass goes on with."""
    first, _, _ = tapped(Native(instructions=instructions, threads=1))
    for threads in (2, 5):
        kit = Native(instructions=instructions, threads=threads)
        states, hidden, ids = tapped(kit)
        assert torch.equal(states, first)
        assert torch.equal(states[-1], hidden.bfloat16())
        assert torch.equal(states[0], kit.rig().runner.ends().embed(ids))


@pytest.mark.parametrize("instructions", EACH)
def test_logits_are_those_of_the_pass(instructions: str) -> None:
    """Of states in the model's dtype or in float32: the head takes bf16. In a few rows and in many."""
    kit = Native(instructions=instructions, threads=2)
    for lengths in ((3,), LENGTHS):
        states, hidden, ids = tapped(kit, lengths)
        rig = kit.rig()
        batch = rig.run.batch({0: ids.tolist()[: lengths[0]]})
        batch.logits_indices = torch.arange(lengths[0])
        logits = rig.runner.execute(batch, None, return_logits=True).logits
        found = rig.runner.ends().logits(states[-1, : lengths[0]])
        assert logits is not None
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(found, rig.runner.ends().logits(hidden[: lengths[0]]))


@pytest.mark.parametrize("threads", [1, 3])
def test_deep_states_are_in_what_the_next_layer_reads(threads: int) -> None:
    """And given ones in what the first reads. The sum is rounded once, and so is what it is compared with."""
    rig, width = Native(threads=threads).rig(), 72
    draw = torch.Generator().manual_seed(4)
    rows, deep = torch.arange(0, 90, 3), torch.randn(30, width, generator=draw).bfloat16()
    found = []
    for request, level in enumerate((torch.zeros_like(deep), deep)):
        batch = rig.run.batch({request: list(range(100))})
        batch.overlay, batch.taps = EmbedOverlay(rows, deep, (level,)), Taps((0, 1))
        rig.runner.execute(batch, None)
        found.append(batch.taps.joined())
    assert torch.equal(found[0][rows, :width], deep)
    assert torch.equal(found[1][:, :width], found[0][:, :width])
    expected = found[0][:, width:].float().index_add(0, rows, deep.float())
    torch.testing.assert_close(found[1][:, width:].float(), expected, rtol=2**-7, atol=2**-5)


def test_places_that_are_not_there() -> None:
    """Native code would write nothing there, and the states of others would be at the wrong place."""
    rig = Native(threads=1).rig()
    for places in ((5,), (-1,), (2, 9)):
        batch = rig.run.batch({0: [1, 2]})
        batch.taps = Taps(places)
        rig.runner.execute(batch, None)
        with pytest.raises(KeyError):
            batch.taps.joined()


@pytest.mark.parametrize("bad", [-1, 320])
def test_ids_that_are_none(bad: int) -> None:
    with pytest.raises(IndexError):
        Native(threads=1).rig().runner.ends().embed(torch.tensor([3, bad]))
