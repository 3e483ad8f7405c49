"""Configs are read as transformers' config classes read them, and what is unknown is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.decoder_spec import ARCHITECTURES, DecoderSpec
from pegboard.toolkit.model.rope import RotaryEmbedding

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def spec(architecture: str, **changes: Any) -> DecoderSpec:
    return DecoderSpec.from_config({"architectures": [architecture], **SMALL, **changes})


TOWERS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
WIDE = {**SMALL, "hidden_size": 512}
"""Heads of 128, for which the axes of the towers' positions are made where a config does not say."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    import transformers

    kv = {"num_key_value_heads": 4} if architecture.startswith("Qwen") else {}
    kv |= {"num_key_value_heads": 2} if architecture.startswith(("Mistral", "Mixtral")) else {}
    name = architecture.replace("ForCausalLM", "Config").replace("ForConditionalGeneration", "TextConfig")
    theirs = getattr(transformers, name)(**WIDE, **kv)
    ours = spec(architecture, **WIDE, **kv)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", None) or 128
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    # A tower's is the whole model's to say: see test_which_config_ties_a_tower.
    assert ours.tied_embeddings == (not ours.tower and theirs.tie_word_embeddings)
    windows = architecture.startswith(("Mistral", "Mixtral"))
    assert ours.windows == (getattr(theirs, "sliding_window", None) if windows else None,) * 4
    assert ours.qkv_bias == architecture.startswith("Qwen2")
    if ours.moe is not None:
        moe = (ours.moe.num_experts, ours.moe.per_token, ours.moe.intermediate_size)
        inter = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert moe == (theirs.num_experts, theirs.num_experts_per_tok, inter)
        # Qwen3-VL-MoE divides in any case, and has no key for that.
        assert ours.moe.normalised == getattr(theirs, "norm_topk_prob", True)
        assert all(ours.moe.layers)
    assert (ours.moe is not None) == ("Moe" in architecture or "Mixtral" in architecture)
    assert ours.position_axes == ours.model_spec().position_axes == (3 if name.endswith("TextConfig") else 1)


@pytest.mark.parametrize("tower", TOWERS)
def test_key_value_heads_of_towers(tower: str) -> None:
    import transformers

    changes = {**WIDE, "num_attention_heads": 32, "head_dim": 128}
    theirs = getattr(transformers, f"{tower}TextConfig")(**changes)
    assert spec(f"{tower}ForConditionalGeneration", **changes).num_kv_heads == theirs.num_key_value_heads


@pytest.mark.parametrize(
    "changes",
    [
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
        {"mlp_only_layers": [0, 3, 7]},
        {"decoder_sparse_step": 5},
    ],
)
def test_layers_with_experts(changes: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    given = {**SMALL, "num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2}
    ours = spec("Qwen3MoeForCausalLM", **given, **changes).moe
    assert ours is not None
    with torch.device("meta"):
        theirs = Qwen3MoeModel(Qwen3MoeConfig(**given, **changes))
    assert ours.num_experts == 3
    assert ours.layers == tuple(isinstance(layer.mlp, Qwen3MoeSparseMoeBlock) for layer in theirs.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer, found 0"),
        ({"num_local_experts": 10**6}, "num_local_experts must be at most 65536"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is above num_experts 4"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of integers, found 3"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of integers"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
    ],
)
def test_experts_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec("Qwen3MoeForCausalLM", **{"num_key_value_heads": 4, **changes})


def test_a_tower_is_read_from_old_and_new_configs() -> None:
    """What Qwen2.5-VL's own file has, transformers 5's, and nested ones of the versions between."""
    sizes = {**WIDE, "num_key_value_heads": 2}
    flat = {**sizes, "rope_theta": 7e5, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    nested = {**sizes, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "mrope_section": [16, 24, 24]}}
    both = {**flat, "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24]}}
    name = "Qwen2_5_VLForConditionalGeneration"
    found = [
        DecoderSpec.from_config({"architectures": [name], "vision_config": {"hidden_size": 8}, **changes})
        for changes in (flat, both, {"text_config": flat}, {"vocab_size": 7, "text_config": nested})
    ]
    assert found == found[:1] * 4
    assert found[0].tower
    assert found[0].rope.theta == 7e5


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_which_config_ties_a_tower(tower: str, outer: bool | None, inner: bool | None) -> None:
    """As transformers decides, but for Qwen3-VL's configs that say it inside alone: it would draw a head at random."""
    import transformers

    stated = {"tie_word_embeddings": outer} if outer is not None else {}
    text = {**WIDE, "num_key_value_heads": 4} | ({} if inner is None else {"tie_word_embeddings": inner})
    ours = spec(f"{tower}ForConditionalGeneration", text_config=text, **stated).tied_embeddings
    theirs = getattr(transformers, f"{tower}Config")(text_config=dict(text), **stated).tie_word_embeddings
    assert ours == (theirs or (outer is None and inner is True))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": False, "sliding_window": 8},
    ],
)
@pytest.mark.parametrize("tower", TOWERS)
def test_windows_of_towers(tower: str, changes: dict[str, Any]) -> None:
    import transformers

    ours = spec(f"{tower}ForConditionalGeneration", **WIDE, **{"num_key_value_heads": 4, **changes}).windows
    if tower.startswith("Qwen3VL"):
        assert ours == (None,) * 4
        return
    theirs = getattr(transformers, f"{tower}TextConfig")(**WIDE, num_key_value_heads=4, **changes)
    assert ours == tuple(8 if kind == "sliding_attention" else None for kind in theirs.layer_types)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, (None,) * 4),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (4096, None, 4096, None),
        ),
    ],
)
def test_qwen_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    from transformers import Qwen2Config

    assert spec("Qwen2ForCausalLM", num_key_value_heads=4, **changes).windows == windows
    theirs = Qwen2Config(**SMALL, num_key_value_heads=4, **changes)
    kinds = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert tuple(kinds) == windows


MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8, "layer_types": MIXED}, (None, 8, 8, None)),
        ({"layer_types": MIXED}, (None, 4096, 4096, None)),
        ({"sliding_window": 8, "layer_types": None}, (8,) * 4),
        ({"sliding_window": 8}, (8,) * 4),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_mistral_windows(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    """A Mistral that lists types of layers is a Ministral, as Ministral-8B-Instruct-2410's config.json is read."""
    from transformers import AutoConfig

    config = {**SMALL, "model_type": "mistral", "num_key_value_heads": 2, **changes}
    assert spec("MistralForCausalLM", **config).windows == windows
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    assert tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds) == windows


def test_mixtral_lists_no_types() -> None:
    """transformers gives a Mixtral's window to all layers, whatever else its config has."""
    assert spec("MixtralForCausalLM", num_key_value_heads=2, sliding_window=8, layer_types=MIXED).windows == (8,) * 4


def test_the_pipelines_view() -> None:
    model = spec("MistralForCausalLM", sliding_window=8, num_key_value_heads=2).model_spec(
        context_length=50, eos_token_ids=frozenset({7})
    )
    assert (model.max_context_len, model.eos_token_ids, len(model.layers)) == (50, {7}, 4)  # type: ignore[comparison-overlap]
    assert {layer.window for layer in model.layers} == {8}
    assert model.layers[2].scale == 0.25
    assert [group.layer_ids for group in model.kv_groups] == [(0, 1, 2, 3)]


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("most", "rope", "context"),
    [
        (128, YARN, 512),
        (512, YARN, 512),
        (160, YARN, 512),
        (1024, YARN, 1024),
        (256, {**YARN, "factor": 1.0}, 256),
        (128, {"type": "yarn", "factor": 4.0}, 512),
        (128, {**YARN, "factor": 2.5}, 320),
        (128, {"type": "linear", "factor": 4.0}, 128),
        (128, None, 128),
    ],
)
def test_yarn_lengthens_the_original_context(most: int, rope: Any, context: int) -> None:
    """Qwen's recipe for long contexts: Qwen2.5's config.json says 32,768 positions, Qwen3's 40,960. Angles are those of
    transformers, at the last position, too.
    """
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    said = {"max_position_embeddings": most, "rope_scaling": rope, "num_key_value_heads": 4}
    model = spec("Qwen2ForCausalLM", **said)
    assert model.model_spec().max_context_len == context
    assert model.model_spec(context_length=context).max_context_len == context
    with pytest.raises(ModelError, match=f"context_length {context + 1} is above the {context} tokens"):
        model.model_spec(context_length=context + 1)
    positions = torch.tensor([0, 127, context - 1])
    ours = RotaryEmbedding(model.rope)(positions, torch.float32)
    theirs = Qwen2RotaryEmbedding(Qwen2Config(**SMALL, **said))(torch.zeros(1), positions[None])
    for own, their in zip(ours, theirs, strict=True):
        assert torch.equal(own.squeeze(1), their[0, :, : own.shape[-1]])


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_dual_chunks_are_ordinary_attention_up_to_the_original_context(architecture: str) -> None:
    """Qwen2.5-7B-Instruct-1M says 1,010,000 positions, and was trained with 262,144."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    given = {"max_position_embeddings": 1010000, "num_key_value_heads": 4, "dual_chunk_attention_config": chunks}
    model = spec(architecture, **given)
    assert model.model_spec().max_context_len == 262144
    with pytest.raises(ModelError, match=r"context_length 262145 is above the 262144 tokens .*dual_chunk"):
        model.model_spec(context_length=262145)
    assert spec(architecture, **{**given, "max_position_embeddings": 1000}).max_position == 1000
    for wrong in ({"chunk_size": 8192}, "on"):
        with pytest.raises(ModelError, match="dual_chunk_attention_config"):
            spec(architecture, **{**given, "dual_chunk_attention_config": wrong})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "architecture BertModel is not one of LlamaForCausalLM"),
        ({"architectures": None}, "architecture none is not one of"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be a positive integer, found 'three'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, found True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints .*'gptq'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
        ({"is_causal": False}, "is_causal is False: the model attends to later tokens"),
        ({"is_causal": None}, "is_causal is None"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec("LlamaForCausalLM", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "layer types linear_attention"),
        ({"layer_types": "all"}, "layer_types must be a list of names, found 'all'"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MistralForCausalLM"])
def test_windows_that_are_not_understood(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec(architecture, **{"use_sliding_window": True, "num_key_value_heads": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"hidden_size": 0}}, "hidden_size must be a positive integer, found 0"),
        ({"text_config": {**WIDE, "quantization_config": {"quant_method": "fp8"}}}, "quantised .*'fp8'"),
        ({"text_config": {**WIDE, "quantization_config": "fp8"}}, "quantised .*'fp8'"),
        ({"text_config": {**WIDE, "is_causal": False}}, "is_causal is False"),
        ({"rope_parameters": {"mrope_section": [2, 3, 2]}}, r"mrope_section .* together 8 .* found \[2, 3, 2\]"),
        ({"rope_parameters": {"mrope_section": [4, 4]}}, "mrope_section must be 3 numbers"),
        ({"rope_parameters": {"mrope_section": [9, -1, 0]}}, "mrope_section must be 3 numbers"),
        ({"rope_parameters": {"mrope_section": "many"}}, "found 'many'"),
        ({"rope_parameters": {"mrope_section": [2, 3, 3], "mrope_interleaved": 1}}, "mrope_interleaved must be true"),
        ({}, r"found \[16, 24, 24\]"),
    ],
)
def test_towers_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec("Qwen2VLForConditionalGeneration", **{"num_key_value_heads": 4, **changes})
