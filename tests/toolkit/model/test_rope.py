"""Frequencies, cos and sin, and the rotation itself equal transformers' bit by bit in float32."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.rope import RotaryEmbedding, apply_rope, inverse_frequencies
from pegboard.toolkit.model.rope_spec import RopeDefaults, rope_from_config

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
        "rope_theta": 10000.0,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
        "rope_theta": 10000.0,
    },
)


def config(rope: dict[str, Any]) -> dict[str, Any]:
    return {"max_position_embeddings": 131072, "rope_parameters": dict(rope)}


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_transformers(rope: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=head_dim * 4, num_attention_heads=4, **config(rope)))
    spec = rope_from_config(config(rope), head_dim, 131072)
    assert torch.equal(inverse_frequencies(spec), theirs.inv_freq)
    assert spec.attention_scaling == theirs.attention_scaling
    positions = torch.cat((torch.arange(50), torch.tensor([4095, 8191, 70000, 131071])))
    q = torch.randn(len(positions), 3, head_dim, generator=torch.Generator().manual_seed(0))
    their_cos, their_sin = theirs(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q[None].transpose(1, 2), q[None].transpose(1, 2), their_cos, their_sin)
    found = apply_rope(q, *RotaryEmbedding(spec)(positions, torch.float32))
    assert torch.equal(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("length", [1, 131072, 131073, 400000])
def test_dynamic_lengths_equal_transformers(length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = ROPES[3]
    llama = LlamaConfig(hidden_size=256, num_attention_heads=4, **config(rope))
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama, torch.device("cpu"), seq_len=length)
    assert torch.equal(inverse_frequencies(rope_from_config(config(rope), 64, 131072), length), expected)


def test_older_keys() -> None:
    new = rope_from_config(config(ROPES[4]), 64, 131072)
    scaling = {"type" if key == "rope_type" else key: value for key, value in ROPES[4].items() if key != "rope_theta"}
    old = {"rope_theta": 500000.0, "rope_scaling": scaling}
    assert rope_from_config(old, 64, 131072) == new
    assert rope_from_config({"rope_theta": 5.0}, 64, 8).theta == 5.0
    assert rope_from_config({}, 64, 8).theta == 10000.0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "rope type 'spiral' is not supported; supported: default"),
        ({"rope_type": "linear"}, "rope parameters: factor must be a positive number, found None"),
        ({"rope_type": "linear", "factor": "two"}, "factor must be a positive number, found 'two'"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor must be a positive number"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, found -1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"full_attention": {"rope_theta": 1.0}}, "per layer type"),
        ([1], "must be an object"),
    ],
)
def test_what_is_not_understood_is_named(rope: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rope_from_config({"rope_parameters": rope}, 64, 4096)


AXES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("qwen2_vl", "Qwen2VL", {"mrope_section": [16, 24, 24]}),
    "qwen2-uneven": ("qwen2_vl", "Qwen2VL", {"mrope_section": [30, 1, 33]}),
    "qwen2.5-yarn": ("qwen2_5_vl", "Qwen2_5_VL", {"mrope_section": [16, 24, 24], "rope_type": "yarn", "factor": 4.0}),
    "qwen3": ("qwen3_vl", "Qwen3VLText", {"mrope_section": [24, 20, 20], "mrope_interleaved": True}),
    "qwen3-uneven": ("qwen3_vl", "Qwen3VLText", {"mrope_section": [10, 30, 24], "mrope_interleaved": True}),
}


def three_axes(name: str) -> tuple[Any, Any]:
    """Transformers' rotary embedding of a case of `AXES`, and ours."""
    module, prefix, given = AXES[name]
    rope = {"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 32768, **given}
    if rope["rope_type"] == "default":
        del rope["original_max_position_embeddings"]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    theirs = getattr(modeling, f"{prefix.removesuffix('Text')}TextConfig")(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=128, **config(rope)
    )
    spec = rope_from_config(config(rope), 128, 131072, RopeDefaults(sections=(16, 24, 24)))
    return getattr(modeling, f"{prefix}RotaryEmbedding")(theirs), RotaryEmbedding(spec)


@pytest.mark.parametrize("name", AXES)
def test_three_axes_equal_transformers(name: str) -> None:
    """Each frequency turns with its own axis."""
    theirs, ours = three_axes(name)
    positions = torch.randint(0, 100000, (3, 200), generator=torch.Generator().manual_seed(1))
    cos, sin = ours(positions, torch.float32)
    for found, expected in zip((cos, sin), theirs(torch.zeros(1), positions[:, None]), strict=True):
        assert found.shape == (200, 1, 64)
        assert found.is_contiguous()
        assert torch.equal(found[:, 0], expected[0, :, :64])


@pytest.mark.parametrize("name", AXES)
def test_equal_axes_are_one(name: str) -> None:
    """Bit by bit, so that prompts without media do not depend on who shares their batch."""
    _, ours = three_axes(name)
    positions = torch.randint(0, 100000, (200,), generator=torch.Generator().manual_seed(2))
    plain, three = ours(positions, torch.float32), ours(positions.expand(3, -1), torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(plain, three, strict=True))


def test_axes_that_an_architecture_has_by_default() -> None:
    chunks = rope_from_config({}, 16, 64, RopeDefaults(sections=(2, 3, 3)))
    assert chunks.axes == (0, 0, 1, 1, 1, 2, 2, 2)
    turns = rope_from_config({}, 16, 64, RopeDefaults(sections=(4, 2, 2), interleaved=True))
    assert turns.axes == (0, 1, 2, 0, 1, 2, 0, 0)
    assert rope_from_config({"rope_scaling": {"mrope_section": [2, 3, 3]}}, 16, 64).axes == ()


def test_axes_that_the_rope_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"positions \[3, 5\] have axes"):
        RotaryEmbedding(rope_from_config({}, 16, 64))(torch.zeros(3, 5, dtype=torch.int64), torch.float32)


def test_half_precision_rounds_only_the_result() -> None:
    spec = rope_from_config({}, 64, 4096)
    cos, sin = RotaryEmbedding(spec)(torch.tensor([4000]), torch.bfloat16)
    exact, _ = RotaryEmbedding(spec)(torch.tensor([4000]), torch.float32)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert torch.equal(cos, exact.bfloat16())
