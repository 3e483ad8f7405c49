"""Heads of any even size, and sizes that are no multiple of anything: right with every instruction set; and models that
it cannot run are left to others, with the reason.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.model_references import context
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.cpu_native.options import CpuNativeOptions
from pegboard.plugins.cpu_native.runner import CpuNativeRunner
from tests.plugins.cpu_native.instruction_sets import SETS
from tests.token_prompts import prompt_ids

SHAPES = {
    "2": (2, 4, 2),
    "6": (6, 4, 2),
    "10-of-5": (10, 5, 5),
    "20": (20, 4, 2),
    "24-of-3": (24, 3, 1),
    "48": (48, 4, 4),
    "64-of-9": (64, 9, 3),
    "80": (80, 4, 2),
    "96": (96, 4, 1),
    "112": (112, 2, 2),
    "128-of-16": (128, 16, 1),
    "160": (160, 2, 1),
    "256": (256, 2, 1),
}
"""Size of a head, query heads, KV heads."""

QUICK = ("20", "80", "96")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def config(checkpoint: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(checkpoint), "dtype": "bfloat16", "device": "cpu"},
        "memory": {"max_total_tokens": 512},
        "log_level": "error",
        **more,
    }


@torch.inference_mode()
def logprobs(checkpoint: Path, dtype: torch.dtype, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, by transformers, float32 [len - 1]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    table = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize(
    ("shape", "instructions"),
    [
        pytest.param(shape, name, marks=[] if shape in QUICK and name == SETS[0] else pytest.mark.full)
        for shape in SHAPES
        for name in SETS
    ],
)
def test_heads(directory: Path, shape: str, instructions: str) -> None:
    """Logprobs of prompts and of what follows them are off no further than transformers' own in bfloat16."""
    dim, heads, kv_heads = SHAPES[shape]
    checkpoint = tiny_checkpoint(
        directory,
        "llama",
        hidden_size=heads * 22,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
    )
    draw = np.random.default_rng(2)
    requests = [
        GenerateRequest(
            prompt=draw.integers(3, 200, size=n).tolist(),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True),
            logprobs=0,
            logprob_start=0,
        )
        for n in (90, 3, 37)
    ]
    runner = {"use": "cpu_native", "instructions": instructions, "threads": 2}
    with Engine.from_config(config(checkpoint, runner=runner)) as engine:
        answers = engine.run(requests)
    ours, theirs = [], []
    for request, answer in zip(requests, answers, strict=True):
        ids = [*prompt_ids(request), *answer.token_ids]
        found = [value for value, _, _ in answer.input_logprobs[1:]] + [value for value, _, _ in answer.logprobs]  # type: ignore[index, union-attr]
        exact = logprobs(checkpoint, torch.float32, ids)
        ours.append(torch.tensor(found) - exact)
        theirs.append(logprobs(checkpoint, torch.bfloat16, ids) - exact)
    ours_rms, theirs_rms = (float(torch.cat(one).square().mean().sqrt()) for one in (ours, theirs))
    assert ours_rms <= theirs_rms, f"error {ours_rms:.4f}, transformers in bf16 {theirs_rms:.4f}"


class TestDeclined:
    """Under `auto` the next runner takes over; one that was named says why it cannot."""

    @pytest.mark.parametrize(
        ("architecture", "changes", "reason"),
        [
            ("gemma2", {}, "architecture Gemma2ForCausalLM is not one of"),
            ("gpt_neox", {}, "architecture GPTNeoXForCausalLM is not one of"),
            (
                "llama",
                {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 1, "head_dim": 8},
                "24 query heads share 1 KV heads; at most 16",
            ),
        ],
        ids=["gemma2", "gpt_neox", "24-share-1"],
    )
    def test_models(
        self, directory: Path, caplog: pytest.LogCaptureFixture, architecture: str, changes: dict[str, Any], reason: str
    ) -> None:
        checkpoint = tiny_checkpoint(directory, architecture, **changes)
        with caplog.at_level(logging.INFO), Engine.from_config(config(checkpoint, log_level="info")) as engine:
            assert engine.info.providers["runner"] == ["layered"]
            (answer,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True))
            assert len(answer.token_ids) == 2
        lines = [one for one in caplog.messages if one.startswith("runner:")]
        assert len(lines) == 1, "said once"
        assert lines[0].startswith("runner: layered")
        assert f"cpu_native: {reason}" in lines[0]
        with pytest.raises(ConfigError) as raised:
            Engine.from_config(config(checkpoint, runner={"use": "cpu_native"}))
        assert "runner.use" in str(raised.value)
        assert reason in str(raised.value)

    def test_heads_of_an_odd_size(self, directory: Path) -> None:
        """No rotary embedding can turn them: nothing of the kind may get as far as the library."""
        model = replace(context(tiny_checkpoint(directory, "llama"), head_dim=21), dtype=torch.bfloat16)
        none: Any = None
        ctx = ModelRunnerContext(none, model, none, none, none, (), model.device)
        assert (
            CpuNativeRunner.supports(None, ctx) == "config.json: head_dim must be even for rotary embeddings, found 21"  # type: ignore[arg-type]
        )

    def test_kv_of_another_type(self, directory: Path) -> None:
        """Its attention reads bfloat16 and nothing else."""
        model = replace(context(tiny_checkpoint(directory, "llama")), dtype=torch.bfloat16)
        none: Any = None
        said = {
            kv: CpuNativeRunner.supports(
                CpuNativeOptions(), ModelRunnerContext(none, model, none, none, none, (), model.device, kv_dtype=kv)
            )
            for kv in (None, torch.float8_e4m3fn, torch.float16)
        }
        assert said[None] is None
        assert "not in float8_e4m3fn; set memory.kv_dtype to auto" in str(said[torch.float8_e4m3fn])
        assert "not in float16; set memory.kv_dtype to auto" in str(said[torch.float16])

    def test_weights_of_another_format_compute_another_kv(self, directory: Path) -> None:
        model = replace(context(tiny_checkpoint(directory, "llama")), dtype=torch.bfloat16)
        none: Any = None
        ctx = ModelRunnerContext(none, model, none, none, none, (), model.device)
        said = [CpuNativeRunner(CpuNativeOptions(weights=form), ctx).numerics() for form in ("bf16", "int8", "bf16")]
        assert said[0] == said[2] != said[1]
