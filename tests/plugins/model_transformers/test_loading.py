"""Which tensors of a checkpoint become weights of transformers' modules, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.family import TransformersFamily
from pegboard.plugins.model_transformers.loading import ignored_layers
from pegboard.toolkit.model.coded import CodedMatrix
from tests.plugins.model_transformers.test_coded import network_of
from tests.plugins.model_transformers.tiny import SERVED, context, save
from tests.plugins.quantization.published import WRITERS, published, tiny


def with_tensors(directory: Path, **changed: torch.Tensor) -> Path:
    """Return a checkpoint, some of whose tensors have been replaced or added."""
    file = directory / "model.safetensors"
    save_file(load_file(file) | changed, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_without_a_config_for_them_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Not taken for weights, though transformers would convert them to the model's type."""
    name = "model.layers.1.mlp.up_proj.weight"
    save(tmp_path, *SERVED["qwen3"])
    codes = (load_file(tmp_path / "model.safetensors")[name] * 100).to(dtype)
    with_tensors(tmp_path, **{name: codes, f"{name}_scale": torch.tensor(0.01)})
    short = str(dtype).removeprefix("torch.")
    message = rf"model\.safetensors: {name} {short} \[48, 32\] .*nothing says what these numbers mean"
    with pytest.raises(ModelError, match=message):
        TransformersFamily(NoOptions(), context(tmp_path)).load()


def test_masks_of_bytes_are_no_codes(tmp_path: Path) -> None:
    """Files of Pythia have them beside the weights."""
    save(tmp_path, *SERVED["gpt_neox"])
    mask = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()
    with_tensors(tmp_path, **{f"gpt_neox.layers.{i}.attention.bias": mask.clone() for i in range(3)})
    assert TransformersFamily(NoOptions(), context(tmp_path)).load() is not None


def test_layers_that_a_class_ignores() -> None:
    """GLM-4.5 has 92 layers and one for multi-token prediction, its Air 46 and one; both are of one class."""
    patterns = transformers.Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected
    assert patterns is not None
    end = "mlp.experts.3.up_proj.weight"
    for count, expected in ((92, {92}), (46, {46, 92})):
        modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(count)]
        ignored = ignored_layers(patterns, modules)
        assert {layer for layer in range(100) if ignored(f"model.layers.{layer}.{end}")} == expected
        assert not ignored("model.embed_tokens.weight")
    following = ignored_layers([r"^mtp.*"], ["model.layers.0.mlp.up_proj"])
    assert following(f"mtp.layers.0.{end}")
    assert not following(f"model.layers.0.{end}")


def test_layers_that_nobody_uses_are_not_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here DeepSeek-V3's for multi-token prediction, the 62nd, which its class ignores."""
    plain = tiny(tmp_path / "plain", "deepseek_v3", head_dim=8)
    file = plain / "model.safetensors"
    tensors = load_file(file)
    last = [name for name in tensors if "layers.1." in name]
    more = {name.replace("layers.1.", "layers.61."): tensors[name].clone() for name in last}
    save_file(tensors | more, file, metadata={"format": "pt"})
    coded, _ = published(tmp_path / "coded", plain, WRITERS["fp8 blocks"])
    filled: list[str] = []
    fill = CodedMatrix.fill

    def noted(matrix: CodedMatrix, target: torch.Tensor) -> None:
        filled.append(matrix.codes.name)
        fill(matrix, target)

    monkeypatch.setattr(CodedMatrix, "fill", noted)
    network_of(coded)
    assert {name.split(".")[2] for name in filled} == {"0", "1"}, "some matrices of each layer are dequantised"
