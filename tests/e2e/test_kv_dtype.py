"""KV in 8 bits from end to end: what comes out, what is kept in files, and what servers send each other.

What is right comes from transformers, which recomputes every text as a whole, with keys and values rounded in its own
attention as they are defined to be: divided by the layer's scale, clamped, rounded to 8 bits, and multiplied again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.model.hadamard import matrix
from tests.e2e.disagg_pair import assert_answered, pair

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
SCALES = {0: (0.004, 0.006), 1: (0.002, 0.003)}
"""Such that some keys and values are clamped."""
OPENING = [(11 * step) % 250 + 3 for step in range(40)]
PROMPTS = [OPENING + [(number * step) % 9 + 20 for step in range(30)] for number in (1, 2, 3, 5)]
"""They share a prefix."""
TOLERANCE = 0.01
"""Of logprobs. Float32 sums in another order send a number near the middle of two 8-bit ones to the other, now and
then; that moves a logprob by some thousandths. Without rounding they are off by much more, as the test says."""


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    """A checkpoint with scales."""
    plain = tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)
    directory = checkpoints / "llama-8-bit"
    if not directory.exists():
        shutil.copytree(plain, directory)
        tensors = load_file(directory / "model.safetensors")
        for layer, both in SCALES.items():
            for part, scale in zip("kv", both, strict=True):
                tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(scale)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def config(model: Path, kv: str = "fp8_e4m3", **more: Any) -> dict[str, Any]:
    memory = {"page_size": 4, "max_total_tokens": 1024, "kv_dtype": kv, **more.pop("memory", {})}
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu", "context_length": 256},
        "log_level": "error",
        "attention": {"use": "torch"},
        "memory": memory,
        **more,
    }


def ask(engine: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[GenerateOutput]:
    return engine.run([GenerateRequest(prompt=one, sampling=GREEDY, logprobs=0) for one in prompts])


class Recomputed:
    """transformers on a whole text, with keys and values rounded by `round_to`."""

    def __init__(self, directory: Path, round_to: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def attend(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any):
            k_scale, v_scale = SCALES[cast(int, module.layer_idx)]
            return sdpa_attention_forward(module, q, round_to(k, k_scale), round_to(v, v_scale), *rest, **more)

        AttentionInterface.register("rounded", attend)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="rounded")

    def off_by(self, prompt: list[int], out: GenerateOutput) -> float:
        """Return how far an answer is off: its logprobs, or its tokens from the most probable ones."""
        text = torch.tensor([prompt + out.token_ids])
        with torch.inference_mode():
            logprobs = self._model(text, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = torch.tensor([value for value, _, _ in out.logprobs or []])
        said = logprobs.gather(1, torch.tensor(out.token_ids)[:, None]).squeeze(1)
        return float(torch.maximum((found - said).abs(), logprobs.max(-1).values - said).max())


def in_eight_bits(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.fixture(scope="module")
def recomputed(model: Path) -> Recomputed:
    return Recomputed(model, in_eight_bits)


def test_answers_are_those_of_a_recomputation(model: Path, recomputed: Recomputed) -> None:
    """In chunks, over a cached prefix, and with trees of drafts."""
    chunks = {"chunked_prefill_size": 16}
    with Engine.from_config(config(model, scheduler=chunks)) as engine:
        first, again = ask(engine), ask(engine)
        pool = engine.built.pool
        assert {pool.keys(0).dtype, pool.values(1).dtype} == {torch.float8_e4m3fn}
    outputs = {" ".join(map(str, prompt)): out.token_ids for prompt, out in zip(PROMPTS, first, strict=True)}
    drafts = {"use": "drill", "outputs": outputs, "shape": "tree", "hit_rate": 0.7, "max_nodes": 8, "adaptive": False}
    with Engine.from_config(config(model, scheduler=chunks, speculation=drafts)) as engine:
        drafted = ask(engine)
        assert engine.stats()["verify_steps"] > 0
    assert min(one.cached_tokens for one in again) >= 64
    for prompt, *answers in zip(PROMPTS, first, again, drafted, strict=True):
        for out in answers:
            assert recomputed.off_by(prompt, out) < TOLERANCE


def test_other_numbers_would_be_noticed(model: Path, recomputed: Recomputed) -> None:
    """KV that is not rounded, and not clamped, gives other logprobs."""
    with Engine.from_config(config(model, "auto")) as engine:
        off = [recomputed.off_by(prompt, out) for prompt, out in zip(PROMPTS, ask(engine), strict=True)]
    assert max(off) > 5 * TOLERANCE


@pytest.mark.parametrize("family", ["dense", "transformers"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_keys_without_scales_are_transformed(name: str, family: str, checkpoints: Path) -> None:
    """Those of the first layer are what they are in float32, by the matrix, and rounded; values are only rounded."""
    model = tiny_checkpoint(checkpoints, name, num_hidden_layers=2)

    def first_layer(kv: str) -> tuple[torch.Tensor, ...]:
        settings = config(model, kv)
        settings["model"]["use"] = family
        with Engine.from_config(settings) as engine:
            ask(engine, PROMPTS[:1])
            pool = engine.built.pool
            return tuple(buffer[4:68].float() for buffer in (pool.keys(0), pool.values(0)))

    (keys, values), (kept_keys, kept_values) = first_layer("auto"), first_layer("fp8_e4m3")
    assert keys.shape == kept_keys.shape
    expected = keys @ matrix(keys.shape[-1], keys.device)
    # Half of the last place, and one place where a number is near the middle of two.
    torch.testing.assert_close(kept_keys, expected, rtol=1 / 16, atol=1 / 512)
    torch.testing.assert_close(kept_values, values, rtol=1 / 16, atol=1 / 512)
    assert float((kept_keys - keys).abs().max()) > 0.1


@pytest.mark.parametrize("kv", ["bfloat16", "fp8_e5m2"])
def test_a_token_takes_as_many_bytes_as_its_type_says(kv: str, model: Path) -> None:
    with Engine.from_config(config(model, kv)) as engine, Engine.from_config(config(model, "fp8_e4m3")) as other:
        ratio = {"bfloat16": 2, "fp8_e5m2": 1}[kv]
        assert engine.built.pool.nbytes == ratio * other.built.pool.nbytes
        assert engine.built.pool.num_slots == other.built.pool.num_slots
        assert engine.generate([PROMPTS[0]], GREEDY)[0].finish_reason["type"] == "length"


def test_files_of_one_type_are_not_read_as_another(model: Path, tmp_path: Path) -> None:
    """Nor under other scales. Those of the same are found by the next server."""
    scaled = Path(shutil.copytree(model, tmp_path / "scaled"))
    files = [{"use": "files", "dir": str(tmp_path / "kv")}]
    memory = {"host": {"max_total_tokens": 2048}, "storage": files, "storage_block": 16}

    def answers(directory: Path, kv: str) -> tuple[list[list[int]], int]:
        cache = {"use": "hiradix", "prefetch_threshold": 16}
        gates = [{"use": "prefetch", "policy": "wait_complete", "threshold": 16}]
        with Engine.from_config(config(directory, kv, memory=memory, prefix_cache=cache, gates=gates)) as engine:
            found = [one.token_ids for one in ask(engine)]
            while engine.built.scheduler.busy:
                engine.built.scheduler.step()
            return found, int(engine.stats()["cached_storage_tokens"])

    first, nothing = answers(model, "fp8_e4m3")
    assert nothing == 0
    for kv in ("auto", "bfloat16", "fp8_e5m2"):
        assert answers(scaled, kv)[1] == 0
    again, cached = answers(scaled, "fp8_e4m3")
    assert cached >= 64
    assert again == first


def test_prefill_and_decode_servers_agree_on_the_type(model: Path) -> None:
    requests = [GenerateRequest(prompt=one, sampling=GREEDY) for one in PROMPTS[:2]]
    with Engine.from_config(config(model)) as engine:
        expected = [one.token_ids for one in ask(engine, PROMPTS[:2])]
    with pair(config(model), config(model)) as both:
        decoded, prefilled = both.ask(requests)
        assert_answered([*decoded, *prefilled])
        assert [one.token_ids for one in decoded] == expected
        both.settle()
        both.check_books()
    with pair(config(model), config(model, "auto")) as both:
        decoded, _ = both.ask(requests[:1])
        assert decoded[0].finish_reason["type"] == "abort"
        said = json.dumps(decoded[0].finish_reason)
        assert "kept as: torch.float8_e4m3fn" in said
        assert "on prefill, - on decode" in said
        assert "Set alike on both servers: memory.kv_dtype" in said


def test_a_wrong_scale_ends_the_start_only_where_it_is_used(model: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(model, tmp_path / "spoiled"))
    tensors = load_file(spoiled / "model.safetensors")
    name = "model.layers.1.self_attn.v_scale"
    tensors[name] = torch.tensor(0.0)
    save_file(tensors, spoiled / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} is 0\.0.*set memory\.kv_dtype to bfloat16"):
        Engine.from_config(config(spoiled))
    with Engine.from_config(config(spoiled, "bfloat16")) as engine:
        assert len(ask(engine)) == len(PROMPTS)
