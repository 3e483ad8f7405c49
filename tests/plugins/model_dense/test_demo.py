"""The demo model, teacher-forced, against transformers."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.rig.model_references import context
from pegboard.conformance.rig.paged import PagedRun
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.toolkit.text.demo import STRINGS, demo_directory


@pytest.mark.slow
def test_logits_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM

    directory = demo_directory()
    family = DenseFamily(DenseOptions(), context(directory))
    assert family.spec.max_context_len == 8192
    assert family.spec.eos_token_ids == {2}
    run = PagedRun(family.load(), family.spec, length=256)
    ids = Tokenizer.from_directory(directory).encode(" ".join(STRINGS[4:21]))[:160]
    assert len(ids) == 160
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    # Two chunks, so that the second attends to cached keys.
    found = torch.cat((run.step({0: ids[:90]})[0], run.step({0: ids[90:]})[0]))
    error = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(error.max()) < TOLERANCE
