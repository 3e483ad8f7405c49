"""What an engine tells the backend of a prefix that all requests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.attn_triton.backend import TritonAttention

PROMPT = list(range(3, 44))
SHARED = 40
"""Of the prompt's tokens, in whole pages."""


@pytest.mark.parametrize(("pays_from", "told"), [(SHARED, SHARED), (SHARED + 1, 0)])
def test_a_prefix_is_told_where_it_pays(
    pays_from: int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    class Told(TritonAttention):
        prefix_pays_from = pays_from

        def prepare(self, batch: ForwardBatch) -> None:
            if batch.forward_mode.is_decode:
                found.append(batch.common_prefix)
            super().prepare(batch)

    monkeypatch.setattr("pegboard.plugins.attn_triton.backend.TritonAttention", Told)
    config = {
        "model": {"path": str(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)), "dtype": "float32"},
        "attention": {"use": "triton"},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 512, "page_size": 4},
    }
    sampling = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    with Engine.from_config(config) as engine:
        engine.generate([PROMPT], sampling)  # it is cached from then on
        assert found == [0, 0]
        answers = engine.generate([PROMPT, PROMPT], sampling)
    assert answers[0].token_ids == answers[1].token_ids
    assert found[2:] == [told, told]
