"""Many architectures through one family: which are served, that they are right, and why others are refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.rig.paged import PlainAttention, PlainPool
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
from pegboard.core.interfaces.model_family import ModelContext, ProbeRun
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.configs import NotServable
from pegboard.plugins.model_transformers.family import TransformersFamily, probe_prompts, relative_errors
from pegboard.plugins.model_transformers.limits import examine
from pegboard.plugins.model_transformers.masks import reach_of
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.model_transformers.trace import Trace, trace
from pegboard.toolkit.model.pool_probe import PoolProbe
from tests.plugins.model_transformers.tiny import REFUSED, SERVED, VOCAB, context, save


def probe_run(network: TransformersNetwork, spec: ModelSpec, ctx: ModelContext, max_batch: int = 4) -> PoolProbe:
    """The engine's probe, over plain attention and memory."""
    attention = PlainAttention(
        None, AttentionContext(spec.layers, 4, ctx.dtype, ctx.device, max_batch, spec.max_context_len)
    )

    def pool(pages: int) -> PlainPool:
        return PlainPool(None, KVPoolContext(pages, 4, spec.layers, ctx.dtype, ctx.device))

    return PoolProbe(network, spec, attention, pool, 4, ctx.device)


def loaded(ctx: ModelContext) -> tuple[TransformersFamily, TransformersNetwork]:
    family = TransformersFamily(NoOptions(), ctx)
    network = family.load()
    assert isinstance(network, TransformersNetwork)
    return family, network


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_the_models_own(name: str, tmp_path: Path) -> None:
    """In float32, packed, in chunks and decoding (see PoolProbe), within what another order of sums makes."""
    ctx = context(save(tmp_path, *SERVED[name]))
    assert TransformersFamily.supports(None, ctx) is None  # type: ignore[arg-type]
    family, network = loaded(ctx)
    run = probe_run(network, family.spec, ctx)
    family.probe(network, run)
    prompts = probe_prompts(family.spec)
    for prompt, found in zip(prompts, run.logits(prompts), strict=True):
        assert float(relative_errors(found, network.reference_logits(prompt)).max()) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gpt2", "phi3", "qwen3_moe"])
def test_probe_passes_in_bfloat16(name: str, tmp_path: Path) -> None:
    ctx = context(save(tmp_path, *SERVED[name]), torch.bfloat16)
    family, network = loaded(ctx)
    family.probe(network, probe_run(network, family.spec, ctx))


def test_probe_with_one_request_at_a_time(tmp_path: Path) -> None:
    ctx = context(save(tmp_path, *SERVED["qwen3"]))
    family, network = loaded(ctx)
    family.probe(network, probe_run(network, family.spec, ctx, max_batch=1))


def test_a_type_of_its_own_with_a_known_architecture(tmp_path: Path) -> None:
    """As Kimi K2 has, whose architecture is DeepSeek-V3's."""
    directory = save(tmp_path, *SERVED["deepseek_v3"])
    expected = loaded(context(directory))[1].reference_logits([5, 9, 7])
    config = json.loads((directory / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}), "utf-8")
    ctx = context(directory)
    assert TransformersFamily.supports(None, ctx) is None  # type: ignore[arg-type]
    family, network = loaded(ctx)
    family.probe(network, probe_run(network, family.spec, ctx))
    assert torch.equal(network.reference_logits([5, 9, 7]), expected)


def test_a_mistral_that_lists_types_of_layers_is_a_ministral(tmp_path: Path) -> None:
    """As Ministral-8B-Instruct-2410 does: its layers differ, and transformers' own auto class makes a Ministral."""
    prefix, fields = SERVED["mistral"]
    directory = save(tmp_path, prefix, fields)
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = json.loads((directory / "config.json").read_text("utf-8")) | {"layer_types": types}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    ctx = context(directory)
    assert ctx.architecture == "MistralForCausalLM"
    assert TransformersFamily.supports(NoOptions(), ctx) is None
    family, network = loaded(ctx)
    assert [layer.window for layer in family.spec.layers] == [None, 16, None]
    run = probe_run(network, family.spec, ctx)
    family.probe(network, run)
    prompt = probe_prompts(family.spec)[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert len(prompt) > 16
    assert float(relative_errors(run.logits([prompt])[0], expected).max()) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_refused_without_weights(name: str, tmp_path: Path) -> None:
    prefix, fields, word = REFUSED[name]
    save(tmp_path, prefix, fields)
    (tmp_path / "model.safetensors").unlink()
    ctx = dataclasses.replace(context(tmp_path), context_length=64)
    reason = TransformersFamily.supports(None, ctx)  # type: ignore[arg-type]
    assert reason is not None
    assert word in reason
    assert reason.startswith(ctx.architecture)
    with pytest.raises(ModelError, match=re.escape(word)):
        TransformersFamily(NoOptions(), ctx)


class Unexamined(TransformersFamily):
    """As if `supports` had let the model through: attention is taken to be what its config says."""

    def _examine(self) -> tuple[Trace, int]:
        # Here, for it imports for two seconds.
        from transformers.models.mamba.modeling_mamba import MambaOutput

        config = self.ctx.hf_config
        heads = 4
        hidden = config.get("hidden_size") or config["n_embd"]
        layers = tuple(LayerSpec(i, heads, heads, hidden // heads, hidden // heads, 0.1) for i in range(2))
        mamba = config["model_type"] == "mamba"
        body, output = ("backbone", MambaOutput) if mamba else ("transformer", BaseModelOutputWithPast)
        return Trace(layers, (body, "lm_head"), body, output, VOCAB, hidden, 0), 64

    def load(self) -> TransformersNetwork:
        network = super().load()
        assert isinstance(network, TransformersNetwork)
        body = network._head.body
        whole, accepted = body.forward, inspect.signature(body.forward).parameters

        def without_positions(*args: Any, **given: Any) -> Any:
            return whole(*args, **{name: value for name, value in given.items() if name in accepted})

        body.forward = without_positions
        return network


@pytest.mark.parametrize("name", ["bloom", "codegen", "mamba"])
def test_probe_notices_silently_wrong_logits(name: str, tmp_path: Path) -> None:
    """These run through without a word, and mix the requests of a batch: Mamba where its states were not seen."""
    mamba = (
        "Mamba",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.2},
    )
    prefix, fields = mamba if name == "mamba" else REFUSED[name][:2]
    ctx = context(save(tmp_path, prefix, fields))
    family = Unexamined(NoOptions(), ctx)
    network = family.load()
    with pytest.raises(ModelError, match="gives wrong logits on paged attention"):
        family.probe(network, probe_run(network, family.spec, ctx))


@pytest.mark.parametrize("name", ["falcon", "gptj"])
def test_models_that_raise_are_an_error_of_the_model(name: str, tmp_path: Path) -> None:
    prefix, fields, _ = REFUSED[name]
    ctx = context(save(tmp_path, prefix, fields))
    family = Unexamined(NoOptions(), ctx)
    with pytest.raises(ModelError, match=ctx.architecture):
        family.probe(family.load(), probe_run(family.load(), family.spec, ctx))


class Failing(ProbeRun):
    def logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        raise RuntimeError("no kernel for this")


class Constant(ProbeRun):
    def __init__(self, value: float) -> None:
        self.value = value

    def logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        return [torch.full((len(prompt), VOCAB), self.value) for prompt in prompts]


@pytest.mark.parametrize(
    ("run", "word"),
    [(Failing(), "no kernel for this"), (Constant(0.0), "wrong logits"), (Constant(float("nan")), "wrong logits")],
)
def test_probe_raises_model_errors(run: ProbeRun, word: str, tmp_path: Path) -> None:
    family, network = loaded(context(save(tmp_path, *SERVED["qwen3"])))
    with pytest.raises(ModelError, match=word):
        family.probe(network, run)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SERVED["llama"][1]}


def bare(**changes: Any) -> ModelContext:
    return ModelContext(Path("nowhere"), {**LLAMA, **changes}, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "neither causal nor a sliding window"),
        ({"architectures": ["MixtralForCausalLM"]}, "does not go with model_type 'llama'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, None),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, None),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, None),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4},
            None,
        ),
        ({"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}, None),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "use_bidirectional_attention": True}, None),
        ({"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"}, "more than once"),
        ({"architectures": ["XGLMForCausalLM"], "model_type": "xglm"}, ""),
        ({"num_hidden_layers": 0}, "never calls"),
        ({"is_causal": False}, "neither causal nor a sliding window"),
        ({"is_causal": False, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "neither causal"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, None),
    ],
)
def test_reasons(changes: dict[str, Any], word: str | None) -> None:
    reason = TransformersFamily.supports(None, bare(**changes))  # type: ignore[arg-type]
    if word is None:
        assert reason is None
    else:
        assert reason is not None
        assert word in reason


def test_rope_that_changes_with_length_needs_a_short_context() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope["original_max_position_embeddings"] = 64
    phi3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": rope}
    ctx = bare(**phi3, original_max_position_embeddings=64)
    reason = TransformersFamily.supports(None, ctx)  # type: ignore[arg-type]
    assert reason is not None
    assert "set model.context_length" in reason
    assert TransformersFamily.supports(None, dataclasses.replace(ctx, context_length=64)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("original", "length"), [(64, 256), (48, 192), (16, 64), (8, 64)])
def test_yarn_lengthens_the_original_context(original: int, length: int) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": original}
    ctx = bare(max_position_embeddings=64, rope_parameters=rope)
    assert examine(ctx)[1] == length
    assert examine(dataclasses.replace(ctx, context_length=length))[1] == length
    with pytest.raises(NotServable, match=f"has positions for {length} tokens"):
        examine(dataclasses.replace(ctx, context_length=length + 1))


def test_dual_chunks_are_ordinary_attention_up_to_the_original_context(caplog: pytest.LogCaptureFixture) -> None:
    ctx = bare(max_position_embeddings=1010, dual_chunk_attention_config={"original_max_position_embeddings": 262})
    assert TransformersFamily(NoOptions(), ctx).spec.max_context_len == 262
    assert "dual_chunk_attention_config is not supported, so prompt and output together are limited to 262 tokens" in (
        caplog.text
    )
    with pytest.raises(NotServable, match="has positions for 262 tokens"):
        examine(dataclasses.replace(ctx, context_length=263))
    reason = TransformersFamily.supports(NoOptions(), bare(dual_chunk_attention_config={"chunk_size": 8}))
    assert reason is not None
    assert "dual_chunk_attention_config: original_max_position_embeddings must be a positive integer" in reason


@pytest.mark.parametrize("size", [2, 3, 8, 19])
def test_chunks_are_read_from_masks(size: int) -> None:
    def chunks(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(1, dtype=torch.long, device="meta")[batch]
        return (k <= q) & ((k - padding) // size == (q - padding) // size)

    assert reach_of(chunks, size, "a") == (None, False)
    assert reach_of(chunks, 20, "a") == (size, True)
    assert reach_of(chunks, size + 1, "a") == (size, True)


def test_masks_that_change_on_the_way_are_refused() -> None:
    """A window that begins to grow, and chunks that do not go on."""

    def growing(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k > q - torch.where(q < 15, 4, 5))

    def once(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & ((k >= 8) | (q < 8))

    for mask in (growing, once):
        with pytest.raises(NotServable, match="neither causal nor a sliding window nor in chunks"):
            reach_of(mask, 20, "a")


@pytest.mark.parametrize("window", [1, 2, 7, 19])
def test_windows_are_read_from_masks(window: int) -> None:
    def sliding(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k > q - window)

    assert reach_of(sliding, 20, "a") == (window, False)
    assert reach_of(sliding, window, "a") == (None, False)


def test_masks_in_both_directions_are_refused() -> None:
    def near(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k - q).abs() < 4

    with pytest.raises(NotServable, match="in both directions"):
        reach_of(near, 20, "a")


def test_layers_say_what_the_model_asks_for() -> None:
    _, fields = SERVED["gpt_oss"]
    spec = TransformersFamily(
        NoOptions(), bare(**fields, model_type="gpt_oss", architectures=["GptOssForCausalLM"])
    ).spec
    assert [layer.window for layer in spec.layers] == [16, None, 16]
    assert [layer.num_sinks for layer in spec.layers] == [4, 4, 4]
    gemma = TransformersFamily(
        NoOptions(), bare(**SERVED["gemma2"][1], model_type="gemma2", architectures=["Gemma2ForCausalLM"])
    ).spec
    assert {layer.logit_cap for layer in gemma.layers} == {2.0}
    assert {layer.scale for layer in gemma.layers} == {12**-0.5}


def test_a_large_model_is_examined_in_no_time_and_memory() -> None:
    """405 billion parameters on the meta device: what would not be possible with weights."""
    found = trace(
        {
            "model_type": "llama",
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        131072,
    )
    assert len(found.layers) == 126
    assert found.hidden_size == 16384


def test_eos_of_both_configs(tmp_path: Path) -> None:
    save(tmp_path, *SERVED["qwen3"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    assert TransformersFamily(NoOptions(), context(tmp_path)).spec.eos_token_ids == {1, 5, 6}


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path, *SERVED["qwen3"])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights only"):
        TransformersFamily(NoOptions(), context(tmp_path)).load()
