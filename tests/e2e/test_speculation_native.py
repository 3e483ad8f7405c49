"""Drafts with the native runner: greedy answers of the demo model in bfloat16 are those without drafts.

Passes over several tokens of a request add up in another order than a decode step, so an answer may leave the other one
where two tokens are so close that rounding decides, and nowhere else.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.e2e.reference import MIN_COMPARED

HEAD = Path("examples/draft_head")
NEAR = 0.15
"""Of logprobs, where rounding to bfloat16 may decide."""
TEXTS = (
    "The capital of France is",
    "One, two, three, four, five,",
    "Monday, Tuesday, Wednesday,",
    "Once upon a time there was a fox who",
    "A B C D E F G",
    "Repeat after me: the cat sat on the mat. The cat sat on the mat.",
    "A list of colours:\n- red\n- green\n",
    "To bake bread you need flour,",
)
TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
REQUESTS = [GenerateRequest(prompt=text, sampling=GREEDY, logprobs=2) for text in TEXTS]


def answers(**speculation: Any) -> tuple[list[GenerateOutput], dict[str, Any], list[list[int]]]:
    """What is answered, the engine's counters, and the prompts' tokens."""
    config = {
        "model": {"path": "demo:smollm2-135m-instruct", "dtype": "bfloat16"},
        "runner": {"use": "cpu_native"},
        "memory": {"max_total_tokens": 4096},
        "log_level": "error",
        "speculation": {"adaptive": False, "max_nodes": 8, **speculation},
    }
    with Engine.from_config(config) as engine:
        outputs = engine.run(REQUESTS)
        return outputs, engine.stats(), [engine.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def plain() -> tuple[list[GenerateOutput], dict[str, tuple[int, ...]]]:
    outputs, _, prompts = answers(use="none")
    return outputs, {
        " ".join(map(str, prompt)): tuple(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)
    }


SLOW = ("ngram", "chain", "eagle", "eagle tree")


@pytest.mark.parametrize("drafts", [*(pytest.param(one, marks=pytest.mark.full) for one in SLOW), "tree"])
def test_same_answers(drafts: str, plain: tuple[list[GenerateOutput], dict[str, tuple[int, ...]]]) -> None:
    expected, recorded = plain
    settings: dict[str, Any] = {"use": "drill", "outputs": recorded, "shape": drafts, "hit_rate": 0.8}
    if drafts == "ngram":
        settings = {"use": "ngram"}
    elif drafts.startswith("eagle"):
        settings = {"use": "eagle", "draft": str(HEAD), "topk": 3 if "tree" in drafts else 1}
    outputs, stats, _ = answers(**settings)
    assert stats["drafted_tokens"] > 100
    assert stats["accepted_tokens"] > 0
    assert stats["plugin_failures"] == stats["failed_batches"] == stats["book_errors"] == 0
    compared = 0
    for text, ours, theirs in zip(TEXTS, outputs, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        compared += same
        assert theirs.logprobs is not None
        if same < len(theirs.token_ids):
            (best, _), (second, _) = theirs.logprobs[same][2]
            assert best - second < NEAR, f"{text!r}: token {same} differs, though it is {best - second:.3f} ahead"
    assert compared >= MIN_COMPARED * TOKENS * len(TEXTS)
