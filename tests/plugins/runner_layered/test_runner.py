"""What the layered runner refuses, and logits without sampling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.runner import LayeredRunner


class Kit(ModelRunnerContract):
    """The suite's rig, without its tests."""

    provider = "layered"
    __test__ = False


def test_needs_a_loaded_network() -> None:
    ctx = Kit().rig().runner.ctx
    with pytest.raises(ValueError, match="network"):
        LayeredRunner(LayeredOptions(), replace(ctx, network=None))


def test_needs_one_row_of_parameters_per_sampled_row() -> None:
    rig = Kit().rig()
    batch = rig.run.batch({0: [1, 2], 1: [3]})
    batch.logits_indices = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="3 rows of sampling parameters for 2 sampled rows"):
        rig.runner.execute(batch, make_sampling([{}] * 3, rig.run.spec.vocab_size))


def test_logits_of_every_token_without_sampling() -> None:
    """Teacher forcing: nothing is sampled, and the logits of all rows are asked for."""
    kit, prompt = Kit(), [5, 9, 200, 31]
    rig = kit.rig()
    batch = rig.run.batch({0: prompt})
    output = rig.runner.execute(batch, None, return_logits=True, return_hidden_states=True)
    kit.check_logits(output.logits, kit.expected(prompt))
    assert output.hidden_states is not None
    assert len(output.hidden_states) == 4
    assert len(output.next_token_ids) == 0


def test_empty_results_have_shapes() -> None:
    rig = Kit().rig()
    batch = replace(rig.run.batch({0: [1]}), forward_mode=ForwardMode.IDLE)
    output = rig.runner.execute(batch, None, return_logits=True, return_hidden_states=True)
    assert output.logits is not None
    assert output.logits.shape == (0, rig.run.spec.vocab_size)
    assert output.hidden_states is not None
    assert output.hidden_states.shape == (0, rig.run.spec.hidden_size)
