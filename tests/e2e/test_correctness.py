"""Greedy answers equal transformers', whatever is cached, however memory is paged, alone or in company.

See `reference` for what counts as equal. The demo model answers 30 prompts of 1 to some 3,000 tokens with 64 tokens
each; tiny random checkpoints cover the other architectures and attention backends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.core.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.testing.checkpoints import tiny_checkpoint
from tests.e2e.reference import (
    Answer,
    Comparison,
    Reference,
    assert_logits_agree,
    forced_logits,
    prompt_ids,
)

DEMO = "demo:smollm2-135m-instruct"
LENGTH = 64
SMALL_LENGTH = 24
FEW = ("one_word", "python", "unicode", "bees", "turns", "summary")
"""Prompts of the configuration that runs with the normal tests."""

MATRIX = [("radix", 1), ("radix", 16), ("block", 16), ("none", 1), ("none", 16)]
"""Prefix cache and page size."""

LOGPROB_TOLERANCE = 1e-3
"""Of log probabilities that went through the whole pipeline; they are differences of logits of the order of 10."""


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)


def config(path: str | Path, cache: str, page_size: int, attention: str = "torch", **more: Any) -> dict[str, Any]:
    """In float32, with so little memory that thirty requests have to wait for each other now and then."""
    return {
        "model": {"path": str(path), "dtype": "float32", "device": "cpu", **more.pop("model", {})},
        "attention": {"use": attention},
        "prefix_cache": {"use": cache},
        "memory": {"page_size": page_size, "max_total_tokens": 8192, **more.pop("memory", {})},
        **more,
    }


@pytest.fixture(scope="module")
def demo(reference_dir: Path) -> Iterator[Engine]:
    """The demo model in the default configuration."""
    with Engine.from_config(config(DEMO, "radix", 1)) as engine:
        yield engine


def check_answers(engine: Engine, prompts: list[list[int]], expected: list[Answer], length: int) -> None:
    """One by one, then all at once with nothing cached, then all at once with everything cached."""
    alone, together, again = Comparison(), Comparison(), Comparison()
    for number, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        output = engine.generate([prompt], greedy(length), logprobs=0)[0]
        agreed = alone.add(output.token_ids, answer, f"prompt {number} alone")
        check_logprobs(output.logprobs or [], answer, agreed)
    engine.flush_cache()
    for comparison in (together, again):
        for number, output in enumerate(engine.generate(prompts, greedy(length))):
            comparison.add(output.token_ids, expected[number], f"prompt {number} in company")
    for comparison in (alone, together, again):
        comparison.finish()


def check_logprobs(found: list[Any], expected: Answer, agreed: int) -> None:
    """Of the sampled tokens as far as the texts are the same; so the logits of the whole pipeline agree, not only
    their largest.
    """
    for entry, logprob in list(zip(found, expected.logprobs, strict=False))[:agreed]:
        assert entry[0] == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)


# The demo model


def test_few_prompts(demo: Engine, reference_dir: Path) -> None:
    reference = Reference(demo.built.directory, reference_dir)
    prompts = prompt_ids(demo.tokenizer, FEW)
    check_answers(demo, prompts, reference.answers(prompts, SMALL_LENGTH), SMALL_LENGTH)


def test_forced_logits_of_few_prompts(demo: Engine, reference_dir: Path) -> None:
    check_forced(demo, Reference(demo.built.directory, reference_dir), prompt_ids(demo.tokenizer, FEW), SMALL_LENGTH)


def check_forced(engine: Engine, reference: Reference, prompts: list[list[int]], length: int) -> None:
    """Both compute the logits of the reference's own text."""
    for number, (prompt, answer) in enumerate(zip(prompts, reference.answers(prompts, length), strict=True)):
        text = prompt + answer.tokens
        found = forced_logits(engine, text, length)
        assert_logits_agree(found, reference.logits(text, length), f"prompt {number}")


def test_the_prompts_are_what_they_should_be(demo: Engine) -> None:
    lengths = [len(prompt) for prompt in prompt_ids(demo.tokenizer)]
    assert len(lengths) == 30
    assert min(lengths) == 1
    assert 3000 <= max(lengths) < 3200
    assert sum(64 <= length < 1000 for length in lengths) >= 3


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("cache", "page_size"), MATRIX)
def test_all_prompts(cache: str, page_size: int, reference_dir: Path) -> None:
    with Engine.from_config(config(DEMO, cache, page_size)) as engine:
        prompts = prompt_ids(engine.tokenizer)
        expected = Reference(engine.built.directory, reference_dir).answers(prompts, LENGTH)
        check_answers(engine, prompts, expected, LENGTH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page_size", [1, 16])
def test_forced_logits_of_all_prompts(page_size: int, reference_dir: Path) -> None:
    with Engine.from_config(config(DEMO, "radix", page_size)) as engine:
        reference = Reference(engine.built.directory, reference_dir)
        check_forced(engine, reference, prompt_ids(engine.tokenizer), LENGTH)


# Tiny random checkpoints

WINDOW = 16
"""Sliding window of the tiny checkpoints that have one; their longest prompt goes beyond three of them."""

TINY_LENGTHS = (3 * WINDOW + 9, 1, 20, 33)


def tiny_prompts(vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=draw).tolist() for length in TINY_LENGTHS]


def tiny(directory: Path, architecture: str) -> Path:
    overrides = {"sliding_window": WINDOW} if architecture in {"mistral", "gemma2"} else {}
    return tiny_checkpoint(directory, architecture, **overrides)


def check_tiny(directory: Path, reference_dir: Path, engine_config: dict[str, Any], length: int) -> None:
    reference = Reference(directory, reference_dir)
    with Engine.from_config(engine_config) as engine:
        prompts = tiny_prompts(engine.info.vocab_size)
        expected = reference.answers(prompts, length)
        check_answers(engine, prompts, expected, length)
        for number, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            text = prompt + answer.tokens
            assert_logits_agree(
                forced_logits(engine, text, length, chunk=20), reference.logits(text, length), f"prompt {number}"
            )


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16)])
@pytest.mark.parametrize("family", ["dense", "transformers"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_tiny(
    architecture: str, family: str, cache: str, page_size: int, checkpoints: Path, reference_dir: Path
) -> None:
    directory = tiny(checkpoints, architecture)
    chosen = config(directory, cache, page_size, model={"use": family}, scheduler={"chunked_prefill_size": 32})
    check_tiny(directory, reference_dir, chosen, LENGTH)


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16)])
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_neox"])
def test_tiny_through_transformers(
    architecture: str, cache: str, page_size: int, checkpoints: Path, reference_dir: Path
) -> None:
    """Chosen by itself: no other family takes these."""
    directory = tiny(checkpoints, architecture)
    chosen = config(directory, cache, page_size, scheduler={"chunked_prefill_size": 32})
    with Engine.from_config(chosen) as engine:
        assert engine.info.providers["model_family"] == ["transformers"]
    check_tiny(directory, reference_dir, chosen, LENGTH)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "0", reason="Triton's interpreter is turned off")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_tiny_with_interpreted_triton(
    architecture: str, page_size: int, checkpoints: Path, reference_dir: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is an extra")
    directory = tiny(checkpoints, architecture)
    chosen = config(directory, "radix", page_size, attention="triton", scheduler={"chunked_prefill_size": 32})
    check_tiny(directory, reference_dir, chosen, 6)
