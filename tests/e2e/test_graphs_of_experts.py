"""Mixtures of experts as people publish them: transformers' tokens and logits, decode steps as graphs, few launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import launches_transformers
from benchmarks.launches_transformers import MODELS
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.toolkit.graphs import recorded
from tests.e2e.reference import Comparison, Reference, assert_logits_agree, forced_logits
from tests.e2e.test_graph_matrix import FIXED
from tests.tools.families import build
from tests.tools.family_configs import FAMILIES

NEW = 12
PROMPTS = [[(7 * step + number) % 500 + 3 for step in range(length)] for number, length in enumerate((41, 5, 17))]
QUICK = (("gpt_oss", "transformers"), ("glm4_moe", "transformers"))
CASES = (*QUICK, *((name, "transformers") for name in ("minimax_m2", "qwen3_moe", "mixtral")))
CASES = (*CASES, ("qwen3_moe", "dense"), ("mixtral", "dense"))


def engine_of(directory: Path, family: str, capture: TapeCapture) -> Engine:
    """An engine that records decode steps on the CPU, and has no other way to run them."""
    data: dict[str, Any] = {
        "model": {"path": str(directory), "dtype": "float32", "device": "cpu", "use": family},
        "attention": {"use": "fixed"},
        "runner": {"use": "layered", "graphs": "on", "graph_sizes": [1, 2, 4], "prefill_graph_sizes": []},
        "memory": {"max_total_tokens": 512},
        "scheduler": {"max_running_requests": 4},
        "log_level": "error",
    }
    registry = Registry.discover(()).with_plugins(FIXED, distribution="fixed")
    with recorded("cpu", lambda device: capture):
        return Engine(compose(data=data, env={}, registry=registry))


@pytest.mark.parametrize(
    ("name", "family"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_replayed_steps_answer_what_transformers_does(name: str, family: str, tmp_path: Path) -> None:
    """In float32: greedy tokens but for near-ties, and logits within float32's sums."""
    directory = tmp_path / "model"
    build(FAMILIES[name], directory)
    reference = Reference(directory, tmp_path / "answers")
    expected, capture, comparison = reference.answers(PROMPTS, NEW), TapeCapture(), Comparison()
    with engine_of(directory, family, capture) as engine:
        found = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True))
        for prompt, ours, theirs in zip(PROMPTS, found, expected, strict=True):
            comparison.add(ours.token_ids, theirs, name)
            text = [*prompt, *theirs.tokens]
            assert_logits_agree(forced_logits(engine, text, NEW), reference.logits(text, NEW), name)
        figures = engine.stats()["runner"]
        network = engine.built.runner.ctx.network
    comparison.finish()
    assert isinstance(network, TransformersNetwork) == (family == "transformers")
    assert figures["eager_decode_steps"] == 0
    assert capture.replayed == figures["replayed_steps"] >= NEW - 1


@pytest.mark.parametrize("model", ["Qwen3 MoE", "Mixtral", "GPT-OSS", "GLM-4-MoE", "MiniMax-M2"])
def test_experts_are_four_launches(model: str) -> None:
    """Sorted, multiplied twice and summed up, however many experts there are; and a layer has few others."""
    pytest.importorskip("triton")
    found = launches_transformers.count(model, batch=8)
    for layer in (found.own, found.replaced):
        kernels = [name for name in layer if name in ("group_kernel", "product_kernel", "combine_kernel")]
        assert kernels == ["group_kernel", "product_kernel", "product_kernel", "combine_kernel"]
    assert len(found.replaced) <= MODELS[model].most
    assert len(found.replaced) < len(found.own)
