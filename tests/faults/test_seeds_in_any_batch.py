"""A seed and the batch: bfloat16 rounds logits differently beside other requests, and draws must not amplify that."""

from __future__ import annotations

import pytest

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.toolkit.text.demo import demo_gguf

WORDS = ["The harbour", "Seven birds", "My uncle", "In winter", "A letter", "Nobody", "Green glass", "The clock"]


@pytest.mark.full
def test_few_seeded_answers_change_with_the_batch() -> None:
    """With one number per draw, 16 of 16 such answers changed; with noise for each token id it is 1 or 2."""
    demo_gguf()
    config = {
        "model": {"path": "demo:smollm2-135m-instruct", "dtype": "bfloat16", "device": "cpu"},
        "prefix_cache": {"use": "none"},
        "memory": {"max_total_tokens": 2048},
        "log_level": "error",
    }
    asked = [
        GenerateRequest(
            prompt=f"{words} was" if seed % 2 else f"{words} is not what it seems, and",
            sampling=SamplingParams(temperature=1.0, seed=seed, max_new_tokens=12, ignore_eos=True),
        )
        for seed, words in enumerate(WORDS * 2)
    ]
    with Engine.from_config(config) as engine:
        alone = [engine.run([one])[0].token_ids for one in asked]
        together = [output.token_ids for output in engine.run(asked)]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    changed = sum(one != other for one, other in zip(alone, together, strict=True))
    assert changed <= 6, f"{changed} of {len(asked)} answers change with the batch"
