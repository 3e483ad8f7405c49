"""Greedy answers equal transformers', whatever is cached, however memory is paged, alone or in company.

See `reference` for what counts as equal. The demo model answers 30 prompts of 1 to some 3,000 tokens, shortly in
`make test-full` and at more length in `make soak`; tiny random checkpoints cover the other architectures and attention
backends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.conformance.checkpoints import VOCAB_SIZE, tiny_checkpoint, write_tiny_tokenizer
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from tests.e2e.reference import (
    Answer,
    Comparison,
    Reference,
    assert_logits_agree,
    forced_logits,
    prompt_ids,
)
from tests.plugins.model_transformers.tiny import SERVED, save

DEMO = "demo:smollm2-135m-instruct"
DEMO_LENGTH, SHORT_LENGTH, LENGTH, SMALL_LENGTH = 32, 12, 64, 24
FEW, FEW_LENGTH = ("unicode", "turns"), 10
"""Prompts of the configuration that runs with the normal tests, and the tokens of their answers."""

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
    check_answers(demo, prompts, reference.answers(prompts, FEW_LENGTH), FEW_LENGTH)


def test_forced_logits_of_few_prompts(demo: Engine, reference_dir: Path) -> None:
    check_forced(demo, Reference(demo.built.directory, reference_dir), prompt_ids(demo.tokenizer, FEW), FEW_LENGTH)


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


def check_all_prompts(cache: str, page_size: int, reference_dir: Path, length: int) -> None:
    with Engine.from_config(config(DEMO, cache, page_size)) as engine:
        prompts = prompt_ids(engine.tokenizer)
        expected = Reference(engine.built.directory, reference_dir).answers(prompts, length)
        check_answers(engine, prompts, expected, length)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_short_answers_to_all_prompts(reference_dir: Path) -> None:
    check_all_prompts("radix", 16, reference_dir, SHORT_LENGTH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("cache", "page_size"), MATRIX)
def test_all_prompts(cache: str, page_size: int, reference_dir: Path) -> None:
    check_all_prompts(cache, page_size, reference_dir, DEMO_LENGTH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page_size", [1, 16])
def test_forced_logits_of_all_prompts(page_size: int, reference_dir: Path) -> None:
    with Engine.from_config(config(DEMO, "radix", page_size)) as engine:
        reference = Reference(engine.built.directory, reference_dir)
        check_forced(engine, reference, prompt_ids(engine.tokenizer), DEMO_LENGTH)


# Tiny random checkpoints

WINDOW = 16
"""Sliding window of the tiny checkpoints that have one; their longest prompt goes beyond three of them."""

TINY_LENGTHS = (3 * WINDOW + 9, 1, 20, 33)


def tiny_prompts(vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=draw).tolist() for length in TINY_LENGTHS]


def tiny(directory: Path, architecture: str) -> Path:
    overrides = {"sliding_window": WINDOW} if architecture in {"mistral", "gemma2"} else {}
    return tiny_checkpoint(directory, architecture, **overrides)  # type: ignore[arg-type]


def check_tiny(
    reference_dir: Path, engine_config: dict[str, Any], length: int, prompts: list[list[int]] | None = None
) -> None:
    """Answers, and the logits of the reference's text; `prompts` are random ones unless given."""
    with Engine.from_config(engine_config) as engine:
        reference = Reference(engine.built.directory, reference_dir)
        prompts = prompts or tiny_prompts(engine.info.vocab_size)
        expected = reference.answers(prompts, length)
        check_answers(engine, prompts, expected, length)
        for number, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            text = prompt + answer.tokens
            assert_logits_agree(
                forced_logits(engine, text, length, chunk=20), reference.logits(text, length), f"prompt {number}"
            )


@pytest.mark.parametrize(("cache", "page_size"), [pytest.param("radix", 1, marks=pytest.mark.full), ("block", 16)])
@pytest.mark.parametrize("family", ["dense", "transformers"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_tiny(
    architecture: str, family: str, cache: str, page_size: int, checkpoints: Path, reference_dir: Path
) -> None:
    directory = tiny(checkpoints, architecture)
    chosen = config(directory, cache, page_size, model={"use": family}, scheduler={"chunked_prefill_size": 32})
    check_tiny(reference_dir, chosen, LENGTH)


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16)])
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_neox", "deepseek_v3"])
def test_tiny_through_transformers(
    architecture: str, cache: str, page_size: int, checkpoints: Path, reference_dir: Path
) -> None:
    """Chosen by itself: no other family takes these."""
    directory = tiny(checkpoints, architecture)
    chosen = config(directory, cache, page_size, scheduler={"chunked_prefill_size": 32})
    with Engine.from_config(chosen) as engine:
        assert engine.info.providers["model_family"] == ["transformers"]
    check_tiny(reference_dir, chosen, LENGTH)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "olmo2", "phi3"])
def test_more_through_transformers(name: str, tmp_path: Path, reference_dir: Path) -> None:
    """Learned positions, sinks and experts, norms in other places, fused projections with a window."""
    prefix, fields = SERVED[name]
    directory = save(tmp_path, prefix, {**fields, "vocab_size": VOCAB_SIZE})
    write_tiny_tokenizer(directory)
    check_tiny(reference_dir, config(directory, "radix", 16, scheduler={"chunked_prefill_size": 32}), SMALL_LENGTH)


INTERPRETED = """
import json, sys
from pathlib import Path
from tests.e2e.test_correctness import check_tiny

reference_dir, runs = json.load(sys.stdin)
for run in runs:
    check_tiny(Path(reference_dir), **run)
"""


def check_interpreted(reference_dir: Path, runs: list[dict[str, Any]]) -> None:
    """In a process of its own: whether kernels are interpreted is settled when Triton is imported."""
    pytest.importorskip("triton", reason="Triton is an extra")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        input=json.dumps([str(reference_dir), runs]),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "architecture", ["mistral", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen2", "qwen3"))]
)
def test_tiny_with_interpreted_triton(architecture: str, checkpoints: Path, reference_dir: Path) -> None:
    directory = tiny(checkpoints, architecture)
    chunks = {"chunked_prefill_size": 32}
    configs = [config(directory, "radix", size, attention="triton", scheduler=chunks) for size in (1, 16)]
    check_interpreted(reference_dir, [{"engine_config": chosen, "length": 6} for chosen in configs])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_with_interpreted_triton(demo: Engine, reference_dir: Path) -> None:
    """One prompt of eight tokens."""
    prompts = [prompt_ids(demo.tokenizer, ["bridge"])[0][:8]]
    chosen = config(DEMO, "radix", 16, attention="triton")
    check_interpreted(reference_dir, [{"engine_config": chosen, "length": 4, "prompts": prompts}])
