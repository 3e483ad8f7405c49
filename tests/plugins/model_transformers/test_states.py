"""States of many architectures, against those that transformers returns itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.rig.paged import PagedRun
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import Taps
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.family import TransformersFamily, probe_prompts, relative_errors
from tests.plugins.model_transformers.tiny import SERVED, context, save

PLACED = {"gpt2", "gpt_bigcode"}
"""Those whose embeddings depend on positions."""

QUICK = ("gpt2", "gemma2")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SERVED if name != "opt"]
)
def test_states_and_embeddings(name: str, tmp_path: Path) -> None:
    """All but the last layer's output, which transformers does not return."""
    ctx = context(save(tmp_path, *SERVED[name]))
    family = TransformersFamily(NoOptions(), ctx)
    network = family.load()
    theirs = AutoModelForCausalLM.from_pretrained(ctx.directory, dtype=torch.float32, attn_implementation="eager")
    layers, prompts = len(family.spec.layers), probe_prompts(family.spec)
    run = PagedRun(network, family.spec)
    batch = run.batch(dict(enumerate(prompts)))
    batch.taps = Taps((*range(layers), layers + 1))
    run.attention.prepare(batch)
    with torch.inference_mode():
        network.forward(batch)
    found = torch.stack(batch.taps.joined().chunk(layers + 1, dim=1))
    for prompt, ours in zip(prompts, torch.split(found, [len(prompt) for prompt in prompts], dim=1), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        assert float(relative_errors(ours, torch.cat(expected)).max()) < TOLERANCE
    if name in PLACED:
        with pytest.raises(Unsupported, match="depend on positions"):
            network.embed(torch.tensor(prompts[0]))
    else:
        assert torch.equal(network.embed(torch.tensor(prompts[0])), found[0, : len(prompts[0])])


def test_states_of_two_widths_are_refused(tmp_path: Path) -> None:
    """This model projects what leaves its layers."""
    family = TransformersFamily(NoOptions(), context(save(tmp_path, *SERVED["opt"])))
    run = PagedRun(family.load(), family.spec)
    batch = run.batch({0: [1, 2, 3]})
    batch.taps = Taps((0,))
    run.attention.prepare(batch)
    with pytest.raises(Unsupported, match="states of 32 and 24 numbers"), torch.inference_mode():
        run.network.forward(batch)
    assert run.step({1: [1, 2, 3]})[1].isfinite().all()
