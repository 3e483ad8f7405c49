"""What the suite of model families does not ask of scales: names that others have, and configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.kv_config import kept_in_eight_bits, weights_are_plain
from pegboard.toolkit.model.kv_scales import is_kv_scale, read_kv_scales

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LAYER = "model.layers.0.self_attn"


def checkpoint(directory: Path, scales: Mapping[str, float]) -> Path:
    save_file({name: torch.tensor(value) for name, value in scales.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.language_model.layers.11.self_attn.v_scale", True),
        ("model.layers.0.self_attn.attn.q_scale", True),
        ("model.layers.0.self_attn.k_proj.weight_scale", False),
        ("model.layers.0.self_attn.k_proj.weight", False),
        ("model.layers.0.mlp.k_scale", False),
    ],
)
def test_only_what_belongs_to_kv_is_passed_over(name: str, found: bool) -> None:
    assert is_kv_scale(name) is found


def test_the_same_scale_under_two_names(tmp_path: Path) -> None:
    same = {f"{LAYER}.k_scale": 0.5, f"{LAYER}.k_proj.k_scale": 0.5, f"{LAYER}.v_scale": 2.0}
    assert read_kv_scales(checkpoint(tmp_path, same), [0]) == {0: (0.5, 2.0)}
    with pytest.raises(ModelError, match=r"k_scale is 0\.25, and .*k_scale in .* is 0\.5|k_scale is 0\.5, and .*0\.25"):
        read_kv_scales(checkpoint(tmp_path, same | {f"{LAYER}.k_proj.k_scale": 0.25}), [0])


def test_layers_that_a_model_does_not_have_count_for_nothing(tmp_path: Path) -> None:
    both = {f"model.layers.{layer}.self_attn.kv_scale": 1.5 for layer in (0, 7)}
    assert read_kv_scales(checkpoint(tmp_path, both), [0]) == {0: (1.5, 1.5)}


@pytest.mark.parametrize(
    ("config", "kept", "plain"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME, "config_groups": {}}, True, True),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "quant_algo": None}, True, True),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "quant_algo": "FP8"}, True, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME, "config_groups": {"0": {}}}, True, False),
        ({"kv_cache_scheme": {**SCHEME, "dynamic": True}}, False, False),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, False, False),
        ({"kv_cache_scheme": None, "quant_method": "gptq"}, False, False),
        ("fp8", False, False),
    ],
    ids=str,
)
def test_what_a_config_says(config: object, kept: bool, plain: bool) -> None:
    assert kept_in_eight_bits({"quantization_config": config}) is kept
    assert kept_in_eight_bits({"text_config": {"quantization_config": config}}) is kept
    assert weights_are_plain(config) is plain
