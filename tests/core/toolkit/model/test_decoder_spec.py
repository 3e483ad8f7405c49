"""Configs are read as transformers' config classes read them, and what is unknown is named."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.toolkit.model.decoder_spec import ARCHITECTURES, DecoderSpec

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def spec(architecture: str, **changes: Any) -> DecoderSpec:
    return DecoderSpec.from_config({"architectures": [architecture], **SMALL, **changes})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    import transformers

    kv = {"num_key_value_heads": 4} if architecture.startswith("Qwen") else {}
    kv |= {"num_key_value_heads": 2} if architecture.startswith("Mistral") else {}
    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**SMALL, **kv)
    ours = spec(architecture, **kv)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", None) or 16
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.windows == (getattr(theirs, "sliding_window", None) if "Mistral" in architecture else None,) * 4
    assert ours.qkv_bias == (architecture == "Qwen2ForCausalLM")


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


def test_the_pipelines_view() -> None:
    model = spec("MistralForCausalLM", sliding_window=8, num_key_value_heads=2).model_spec(
        context_length=50, eos_token_ids=frozenset({7})
    )
    assert (model.max_context_len, model.eos_token_ids, len(model.layers)) == (50, {7}, 4)  # type: ignore[comparison-overlap]
    assert {layer.window for layer in model.layers} == {8}
    assert model.layers[2].scale == 0.25
    assert [group.layer_ids for group in model.kv_groups] == [(0, 1, 2, 3)]


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
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
    ],
)
def test_windows_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec("Qwen2ForCausalLM", **{"use_sliding_window": True, "num_key_value_heads": 4, **changes})
