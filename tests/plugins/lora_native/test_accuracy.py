"""Adapters in the native runner are as good as bf16 is: its error against merged weights in float32 is not larger than
that of transformers in bf16 with the same merged weights, whatever stands in a batch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.plugins.adapters.peft_files import merged, write_adapter
from tests.plugins.cpu_native.instruction_sets import EACH
from tests.token_prompts import prompt_ids

WIDE: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 1},
    "mistral": {**WIDE, "sliding_window": 50},
    "llama odd": {
        "hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 88,
    },
    "qwen3_moe": {**WIDE, "num_experts": 10, "num_experts_per_tok": 8},
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 8},
    "b": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "c": {"r": 40, "lora_alpha": 20, "target_modules": ["q_proj", "v_proj"]},
    "d": {"r": 8, "lora_alpha": 24, "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"]},
}
SCALES = {"a": 2.0, "b": 4.0, "c": 0.5, "d": 3.0}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "chunks": {
        "scheduler": {"chunked_prefill_size": 16, "mixed_chunk": False},
        "runner": {"use": "cpu_native", "threads": 1},
    },
    "mixed-overlap": {"scheduler": {"chunked_prefill_size": 48, "loop": "overlap"}},
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Models:
    """Checkpoints with adapters, and what transformers makes of each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cache  # noqa: B019  one for the module
    def checkpoint(self, name: str) -> Path:
        return tiny_checkpoint(self.directory, name.split()[0], num_hidden_layers=2, **MODELS[name])

    @cache  # noqa: B019
    def adapter(self, name: str, adapter: str) -> Path:
        path = self.directory / f"{name} {adapter}"
        settings = dict(ADAPTERS[adapter])
        if "moe" in name:
            settings["target_modules"] = [one for one in settings.get("target_modules", ATTENTION) if one in ATTENTION]
        return write_adapter(path, self.checkpoint(name), seed=ord(adapter), size=0.08, **settings)

    @cache  # noqa: B019
    def network(self, name: str, adapter: str, dtype: torch.dtype) -> Any:
        if not adapter:
            return merged(self.checkpoint(name), None).to(dtype)
        return merged(self.checkpoint(name), self.adapter(name, adapter), lambda _: SCALES[adapter]).to(dtype)

    @torch.inference_mode()
    def logprobs(self, name: str, adapter: str, dtype: torch.dtype, ids: list[int]) -> torch.Tensor:
        """Of each token but the first, float32 [len - 1]."""
        table = self.network(name, adapter, dtype)(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return table.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)

    def config(self, name: str, **more: Any) -> dict[str, Any]:
        preload = {one: str(self.adapter(name, one)) for one in ADAPTERS}
        return {
            "model": {"path": str(self.checkpoint(name)), "dtype": "bfloat16", "device": "cpu"},
            "memory": {"max_total_tokens": 2048},
            "log_level": "error",
            "adapters": {"preload": preload},
            **more,
        }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def asked(vocab: int) -> list[tuple[str, GenerateRequest]]:
    """Return requests of all adapters and of none, with prompts of many lengths."""
    draw = np.random.default_rng(1)
    found = []
    for index, length in enumerate((33, 5, 70, 1, 40, 9, 21)):
        name = ("", *ADAPTERS)[index % 5]
        request = GenerateRequest(
            prompt=draw.integers(3, vocab, size=length).tolist(),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
            logprobs=0,
            logprob_start=0,
            params={"adapter": name} if name else {},
        )
        found.append((name, request))
    return found


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if how == "mixed-overlap" and name != "qwen3_moe" else pytest.mark.full)
        for name in MODELS
        for how in ARRANGEMENTS
    ],
)
def test_error_is_that_of_bf16(models: Models, name: str, how: str) -> None:
    with Engine.from_config(models.config(name, **ARRANGEMENTS[how])) as engine:
        assert engine.info.providers["runner"] == ["cpu_native"], "auto chooses it"
        assert engine.info.providers["adapters"] == ["cpu_native"]
        requests = asked(engine.info.vocab_size)
        answers = engine.run([request for _, request in requests])
    ours, theirs, plain = [], [], []
    for (adapter, request), answer in zip(requests, answers, strict=True):
        ids = [*prompt_ids(request), *answer.token_ids]
        exact = models.logprobs(name, adapter, torch.float32, ids)
        assert answer.input_logprobs is not None
        assert answer.logprobs is not None
        found = [value for value, _, _ in (*answer.input_logprobs[1:], *answer.logprobs)]
        ours.append(torch.tensor(found) - exact)
        theirs.append(models.logprobs(name, adapter, torch.bfloat16, ids) - exact)
        if adapter:
            plain.append(models.logprobs(name, "", torch.float32, ids) - exact)
    ours_rms, theirs_rms, plain_rms = (float(torch.cat(one).square().mean().sqrt()) for one in (ours, theirs, plain))
    assert plain_rms > 5 * theirs_rms, "the adapters hardly count"
    assert ours_rms <= 1.1 * theirs_rms, f"error {ours_rms:.4f}, transformers in bf16 {theirs_rms:.4f}"
    assert float(torch.cat(ours).abs().max()) <= 2 * float(torch.cat(theirs).abs().max()) + 0.05


@pytest.mark.parametrize("instructions", EACH)
def test_every_instruction_set(models: Models, instructions: str) -> None:
    config = models.config("llama", runner={"use": "cpu_native", "instructions": instructions, "threads": 3})
    with Engine.from_config(config) as engine:
        requests = asked(engine.info.vocab_size)
        answers = engine.run([request for _, request in requests])
    ours, theirs = [], []
    for (adapter, request), answer in zip(requests, answers, strict=True):
        ids = prompt_ids(request)
        exact = models.logprobs("llama", adapter, torch.float32, ids)
        assert answer.input_logprobs is not None
        found = [value for value, _, _ in answer.input_logprobs[1:]]
        ours.append(torch.tensor(found) - exact)
        theirs.append(models.logprobs("llama", adapter, torch.bfloat16, ids) - exact)
    ours_rms, theirs_rms = (float(torch.cat(one).square().mean().sqrt()) for one in (ours, theirs))
    assert ours_rms <= 1.1 * theirs_rms, f"error {ours_rms:.4f}, transformers in bf16 {theirs_rms:.4f}"


def test_a_batch_without_adapters_is_not_slower_by_a_piece(models: Models) -> None:
    """No request of the batch has one: what the runner computes is what it computes without adapters, to the bit."""
    config = models.config("llama")
    requests = [request for name, request in asked(300) if not name]
    with Engine.from_config(config) as engine:
        configured = engine.run(requests)
    with Engine.from_config({**config, "adapters": {}}) as engine:
        plain = engine.run(requests)
    assert [one.logprobs for one in configured] == [one.logprobs for one in plain]
