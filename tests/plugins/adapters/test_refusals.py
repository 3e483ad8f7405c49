"""What cannot be honoured is refused by name, with the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.adapters.reading import AdapterReader
from pegboard.toolkit.model.linear import Part, Site
from tests.plugins.adapters.peft_files import write_files

SITES = (
    Site(0, (Part("model.layers.0.self_attn.q_proj", 8), Part("model.layers.0.self_attn.k_proj", 4)), 6),
    Site(1, (Part("model.layers.0.self_attn.o_proj", 6),), 8),
)
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]}
Q, OUT = (f"base_model.model.model.layers.0.self_attn.{name}_proj" for name in "qo")
TENSORS = {
    f"{Q}.lora_A.weight": torch.ones(2, 6),
    f"{Q}.lora_B.weight": torch.ones(8, 2),
    f"{OUT}.lora_A.weight": torch.ones(2, 8),
    f"{OUT}.lora_B.weight": torch.ones(6, 2),
}


def reader(max_rank: int = 8) -> AdapterReader:
    return AdapterReader(SITES, torch.float32, max_rank)


def test_what_is_read(tmp_path: Path) -> None:
    write_files(tmp_path, CONFIG, TENSORS)
    found = reader().read(tmp_path)
    assert (found.rank, found.nbytes) == (2, 4 * (12 + 16 + 16 + 12))
    (q,), (o,) = found.weights.sites[0], found.weights.sites[1]
    assert (q.start, o.start, q.scale, tuple(o.b.shape)) == (0, 0, 2.0, (6, 2))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("weight", "default.weight").replace("lora_A.default", "lora_A.default"),
        lambda name: name.replace("base_model.model.", ""),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        lambda name: name.replace("model.layers", "model.language_model.layers"),
    ],
)
def test_names_of_tensors(tmp_path: Path, rename: Callable[[str], str]) -> None:
    """With the adapter's name, without prefix, of a bare body, and of the text of a larger model."""
    write_files(tmp_path, CONFIG, {rename(name): tensor for name, tensor in TENSORS.items()})
    assert set(reader().read(tmp_path).weights.sites) == {0, 1}


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    for name, config, tensors in (
        ("a", CONFIG, TENSORS),
        ("b", CONFIG, TENSORS),
        ("alpha", {**CONFIG, "lora_alpha": 5}, TENSORS),
        ("numbers", CONFIG, {**TENSORS, f"{Q}.lora_A.weight": torch.zeros(2, 6)}),
    ):
        write_files(tmp_path / name, config, tensors)
    digests = [reader().read(tmp_path / name).digest for name in ("a", "b", "alpha", "numbers")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "the method 'IA3' is not supported"),
        ({"peft_type": None}, "the method None is not supported"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias: lora_only"),
        ({"bias": "some"}, "Invalid enum value 'some'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "initialised by pissa_niter_4"),
        ({"r": 0}, ">= 1"),
        ({"r": "4"}, "Expected `int`"),
        ({"r": 4}, r"lora_A.weight float32 \[2, 8\] does not have the shape \[4, 8\]"),
        ({"r": 9}, "has rank 9, adapters.max_rank is 8"),
        ({"target_modules": "q_proj("}, "missing \\), unterminated subpattern"),
        ({"target_modules": ["q_proj"]}, r"o_proj, which adapter_config.json does not target"),
        ({"target_modules": ["q_proj", "o_proj", "k_proj"]}, r"k_proj are missing, which adapter_config.json targets"),
        ({"rank_pattern": {"q_proj": 1}}, r"does not have the shape \[1, 6\]"),
    ],
)
def test_configs(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_files(tmp_path, {**CONFIG, **change}, TENSORS)
    with pytest.raises(ModelError, match=message) as raised:
        reader().read(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q}.lora_B.weight": None}, "is half of a pair; the other half of model.layers.0.self_attn.q_proj"),
        ({f"{Q}.lora_A.weight": None}, "is half of a pair"),
        ({f"{Q}.lora_A.weight": torch.full((2, 6), float("nan"))}, "not finite"),
        ({f"{Q}.lora_B.weight": torch.full((8, 2), float("inf"))}, "not finite"),
        ({f"{Q}.lora_A.weight": torch.ones(2, 5)}, r"\[2, 5\] does not have the shape \[2, 6\]"),
        ({f"{Q}.lora_B.weight": torch.ones(2, 8)}, r"\[2, 8\] does not have the shape \[8, 2\]"),
        ({f"{Q}.lora_A.weight": torch.ones(2, 6, dtype=torch.int32)}, "not of a type that is supported"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(8)}, "lora_magnitude_vector is not supported"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 8)}, "lora_embedding_A is not"),
        ({"base_model.model.lm_head.weight": torch.ones(2, 8)}, "lm_head.weight is not supported"),
        (
            {f"base_model.model.x.lora_{half}.weight": torch.ones(2, 2) for half in "AB"},
            "is of x, which is not a linear layer that takes adapters",
        ),
        (dict.fromkeys(TENSORS), "has no tensors"),
    ],
)
def test_tensors(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in {**TENSORS, **change}.items() if tensor is not None}
    write_files(tmp_path, CONFIG, tensors)
    with pytest.raises(ModelError, match=message) as raised:
        reader().read(tmp_path)
    assert "adapter_model.safetensors" in str(raised.value)


def _no_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def _no_weights(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()


def _pickled(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def _cut(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _garbage(path: Path) -> None:
    (path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)


def _not_json(path: Path) -> None:
    (path / "adapter_config.json").write_text("{")


def _a_list(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps([1]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_config, "has no adapter_config.json"),
        (_no_weights, "adapter_model.safetensors: it is missing"),
        (_pickled, "pickled files are not read"),
        (_cut, "adapter_model.safetensors"),
        (_garbage, "adapter_model.safetensors"),
        (_not_json, "adapter_config.json is not valid JSON"),
        (_a_list, "must hold a JSON object"),
    ],
)
def test_files(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    write_files(tmp_path, CONFIG, TENSORS)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message):
        reader().read(tmp_path)
