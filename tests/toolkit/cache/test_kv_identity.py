"""What makes KV another, and what does not."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pegboard.conformance.attention.batches import make_layer
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.toolkit.cache.kv_identity import described_kv, kept_as, kv_identity

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
    "hidden_size": 64,
}
LAYERS = (make_layer(), make_layer(layer_id=1))
ROWS = 3000


def weights(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of more and of less than what is looked at."""
    torch.manual_seed(0)
    made = {"embed": torch.randn(ROWS, 4), "norm": torch.randn(4), "q": torch.randn(4, 8, dtype=torch.bfloat16)}
    return made | changes


def changed(name: str, place: int) -> torch.Tensor:
    tensor = weights()[name].clone()
    tensor.view(-1)[place] += 1
    return tensor


def write(directory: Path, tensors: Mapping[str, torch.Tensor], files: int = 1) -> Path:
    directory.mkdir()
    for number in range(files):
        part = dict(list(tensors.items())[number::files])
        save_file(part, directory / f"model-{number}.safetensors", metadata={"format": "pt", "number": str(number)})
    return directory


def write_gguf(directory: Path, tensors: Mapping[str, torch.Tensor], alignment: int = 32) -> Path:
    directory.mkdir()
    writer = gguf.GGUFWriter(directory / "some.gguf", "llama")
    writer.add_custom_alignment(alignment)
    writer.add_token_list(["one", "zwei", "très"])
    writer.add_token_scores([1.0, 2.0, 3.0])
    writer.add_name("a model")
    for name, tensor in tensors.items():
        writer.add_tensor(name, (tensor.half() if tensor.dtype is torch.bfloat16 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory


def identity(
    directory: Path,
    config: Mapping[str, Any] = CONFIG,
    dtype: torch.dtype = torch.bfloat16,
    layers: tuple[LayerSpec, ...] = LAYERS,
    numerics: tuple[str, ...] = ("int8", ""),
    kept: str = "",
) -> bytes:
    context = ModelContext(directory, config, dtype, torch.device("cpu"))
    return kv_identity(context, layers, numerics=numerics, kept=kept)


@pytest.mark.parametrize(
    "tensors",
    [
        weights(embed=changed("embed", 0)),
        weights(embed=changed("embed", 4 * ROWS - 1)),  # as of a token that was added and trained
        weights(norm=changed("norm", 3)),
        weights(q=weights()["q"].float()),
        weights(q=weights()["q"].view(8, 4)),
        weights(bias=torch.zeros(4)),
        {"k" if name == "q" else name: tensor for name, tensor in weights().items()},
    ],
    ids=["first row", "last row", "small one", "dtype", "shape", "one more", "name"],
)
@pytest.mark.parametrize("form", [write, write_gguf])
def test_other_weights(
    form: Callable[[Path, Mapping[str, torch.Tensor]], Path], tensors: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    assert identity(form(tmp_path / "a", weights())) != identity(form(tmp_path / "b", tensors))


@pytest.mark.parametrize("form", [write, write_gguf])
def test_a_copy_elsewhere_is_the_same(form: Callable[[Path, Mapping[str, torch.Tensor]], Path], tmp_path: Path) -> None:
    first = form(tmp_path / "a", weights())
    expected = identity(first)
    (first / "README.md").write_text("read me")
    assert len(expected) == 32
    assert identity(first) == expected
    moved = Path(shutil.move(first, tmp_path / "moved"))
    (file,) = (one for one in moved.iterdir() if one.suffix != ".md")
    file.rename(file.with_stem("another"))
    assert identity(moved) == expected


def test_how_tensors_are_spread_over_files_counts_for_nothing(tmp_path: Path) -> None:
    backwards = dict(reversed(weights().items()))
    assert identity(write(tmp_path / "a", weights())) == identity(write(tmp_path / "b", backwards, files=3))


def test_a_gguf_file_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    """By its beginning and end alone, these two would be the same."""
    generator = torch.manual_seed(0)
    around = {name: torch.randn(ROWS, 4, generator=generator) for name in ("first", "middle", "last")}
    other = around | {"middle": around["middle"] + torch.eye(ROWS, 4)}
    first, second = write_gguf(tmp_path / "a", around), write_gguf(tmp_path / "b", other)
    assert identity(first) != identity(second)
    assert identity(first) == identity(write_gguf(tmp_path / "c", around, alignment=64))


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float32},
        {"numerics": ("bf16", "")},
        {"numerics": ("", "int8")},
        {"numerics": ("int8",)},
        {"kept": "torch.float8_e4m3fn"},
        {"layers": LAYERS[:1]},
        {"layers": LAYERS[::-1]},
        {"layers": (*LAYERS, make_layer(layer_id=2))},
        {"layers": (dataclasses.replace(LAYERS[0], num_kv_heads=1), LAYERS[1])},
        {"layers": (dataclasses.replace(LAYERS[0], window=8), LAYERS[1])},
        {"config": {**CONFIG, "hidden_size": 65}},
        {"config": {**CONFIG, "rope_scaling": {"factor": 4.0, "rope_type": "linear"}}},
        {"config": {**CONFIG, "quantization_config": {"bits": 4}}},
    ],
    ids=str,
)
def test_what_else_makes_another(other: dict[str, Any], tmp_path: Path) -> None:
    directory = write(tmp_path / "a", weights())
    assert identity(directory) != identity(directory, **other)


def test_how_a_pool_keeps_kv() -> None:
    """Its type, where that is not the model's, its scales, and whose keys are transformed."""
    model = ModelContext(Path("/nowhere"), CONFIG, torch.bfloat16, torch.device("cpu"))

    def pool(dtype: torch.dtype, *scales: tuple[float, float], dim: int = 8) -> MHAPool:
        layers = tuple(dataclasses.replace(layer, qk_head_dim=dim) for layer in LAYERS)
        made = MHAPool(NoOptions(), KVPoolContext(1, 1, layers, dtype, torch.device("cpu")))
        for layer_id, both in enumerate(scales):
            made.set_scales(layer_id, *both)
        return made

    eight = torch.float8_e4m3fn
    told = [kept_as(pool(eight, *scales), model) for scales in ((), ((1.0, 1.0),), ((0.5, 2.0),), ((2.0, 0.5),))]
    assert kept_as(pool(torch.bfloat16), model) == ""
    assert told[0] == told[1] == "torch.float8_e4m3fn"
    assert told[2] == 'torch.float8_e4m3fn, scaled {"0":[0.5,2.0]}'
    assert (
        kept_as(pool(eight, (0.5, 1.0), dim=64), model) == 'torch.float8_e4m3fn, Hadamard [1], scaled {"0":[0.5,1.0]}'
    )
    assert len({*told, kept_as(pool(torch.float8_e5m2), model), kept_as(pool(torch.float16), model)}) == 5


def test_what_differs_is_named(tmp_path: Path) -> None:
    """Where identities differ so does one of the parts that are told, and no others."""
    directory = write(tmp_path / "a", weights())
    first, second = (
        described_kv(ModelContext(directory, CONFIG, torch.float32, torch.device("cpu")), LAYERS, numerics=numerics)
        for numerics in (("avx2", ""), ("amx", ""))
    )
    assert {name for name in first if first[name] != second[name]} == {"numerics 0"}
    assert (first["numerics 0"], first["dtype"], first["format"]) == ("avx2", "torch.float32", "pegboard-kv-1")
    assert first["config"].startswith("sha256 ")


def test_how_kv_is_kept_is_named_by_its_type(tmp_path: Path) -> None:
    """Whole where that is short; else with a digest of all of it."""
    model = ModelContext(write(tmp_path / "a", weights()), CONFIG, torch.float32, torch.device("cpu"))
    kinds = ("", "torch.float8_e4m3fn", *(f"torch.float8_e4m3fn, Hadamard {[*range(n)]}" for n in (29, 30)))
    told = [described_kv(model, LAYERS, kept=kept).get("kept as") for kept in kinds]
    assert told[:2] == [None, "torch.float8_e4m3fn"]
    assert all(str(one).startswith("torch.float8_e4m3fn (sha256 ") for one in told[2:])
    assert len({*told}) == 4


def test_what_a_config_says_of_its_origin_counts_for_nothing(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", weights())
    told = dict(reversed(list(CONFIG.items()))) | {"_name_or_path": "/tmp/x", "torch_dtype": "float16", "dtype": None}
    assert identity(directory, told) == identity(directory)
    nested = {"text_config": {"a": 1}}
    assert identity(directory, nested) == identity(directory, {"text_config": {"a": 1, "_name_or_path": "x"}})


def test_files_that_cannot_be_read_as_what_they_are_called_still_count(tmp_path: Path) -> None:
    found = set()
    for number, (name, content) in enumerate(
        [
            ("a.safetensors", b"x" * 9000),
            ("a.safetensors", b"x" * 8999 + b"y"),
            ("a.gguf", b"GGUF" + bytes(100)),
            ("a.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 60),
            ("a.gguf", b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 60),
            ("weights.bin", b"x" * 100_000),
            ("weights.bin", b"x" * 100_001),
            ("weights.bin", b"y" + b"x" * 99_999),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / name).write_bytes(content)
        found.add(identity(directory))
    assert len(found) == 8
    with pytest.raises(OSError, match="nowhere"):
        identity(tmp_path / "nowhere")


def test_a_large_tensor_is_not_read_as_a_whole(tmp_path: Path) -> None:
    """What lies between its ends is not looked at: that is what makes it quick."""
    tensors = weights(embed=changed("embed", 2 * ROWS))
    assert np.prod(tensors["embed"].shape) * 4 > 3 * 4096
    assert identity(write(tmp_path / "a", weights())) == identity(write(tmp_path / "b", tensors))
