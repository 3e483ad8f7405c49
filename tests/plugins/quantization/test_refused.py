"""Checkpoints that cannot be: refused before weights are read, by file, tensor and shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from pegboard import Engine
from pegboard.core.cli.main import app
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.compressed import CompressedTensors
from pegboard.toolkit.model.coded import slots_of
from tests.plugins.quantization.published import WRITERS, published, tiny

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a checkpoint of a format."""
    root = tmp_path_factory.mktemp("coded")
    plain = tiny(root / "plain")
    return lambda name: published(root / name, plain, WRITERS[name])[0]


def start(directory: Path, use: str = "auto", **sections: object) -> None:
    """Start an engine. `use` names the model's family."""
    model = {"path": str(directory), "dtype": "float32", "use": use}
    Engine(compose(data={"model": model, "memory": {"max_total_tokens": 64}, **sections}, env={})).close()


def changed(source: Path, directory: Path, change: Callable[[dict[str, Tensor]], object], **config: object) -> Path:
    """Return a copy of a checkpoint with other tensors, and other words about quantisation."""
    directory.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((directory / "config.json").read_text("utf-8"))
    told["quantization_config"] |= config
    (directory / "config.json").write_text(json.dumps(told), "utf-8")
    return directory


def test_a_scale_is_missing(coded: Callable[[str], Path], tmp_path: Path) -> None:
    there = changed(coded("fp8 blocks"), tmp_path / "x", lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"))
    with pytest.raises(ModelError, match=rf"lacks {Q}\.weight_scale_inv, which {Q}\.weight needs"):
        start(there)


def test_codes_are_missing(coded: Callable[[str], Path], tmp_path: Path) -> None:
    there = changed(coded("fp8 blocks"), tmp_path / "x", lambda tensors: tensors.pop(f"{Q}.weight"))
    with pytest.raises(ModelError, match=rf"model\.safetensors: {Q}\.weight_scale_inv float32 \[1, 1\] has no codes"):
        start(there)
    there = changed(coded("awq"), tmp_path / "y", lambda tensors: tensors.pop(f"{Q}.qweight"))
    with pytest.raises(ModelError, match=rf"model\.safetensors: {Q}\.qzeros \[6, 16\] has no place in this model"):
        start(there)


def test_a_matrix_that_has_another_shape(coded: Callable[[str], Path], tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"][:64].contiguous()

    there = changed(coded("fp8 blocks"), tmp_path / "x", cut)
    with pytest.raises(ModelError, match=rf"{Q}\.weight has shape \[64, 96\], the config asks for \[128, 96\]"):
        start(there)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_none(coded: Callable[[str], Path], tmp_path: Path, value: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.scales"][2, 5] = value

    there = changed(coded("awq"), tmp_path / "x", spoil)
    with pytest.raises(ModelError, match=rf"{Q}\.scales float16 \[6, 128\] has a scale of {value}"):
        start(there)


@pytest.mark.parametrize("group", [-1, 6])
def test_a_column_of_no_group(coded: Callable[[str], Path], tmp_path: Path, group: int) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.g_idx"][3] = group

    there = changed(coded("gptq"), tmp_path / "x", spoil)
    with pytest.raises(ModelError, match=rf"{Q}\.g_idx int32 \[96\] has columns of the groups .* scales of 6"):
        start(there)


def test_groups_that_do_not_divide(coded: Callable[[str], Path], tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        for end in ("scales", "qzeros"):
            tensors[f"{Q}.{end}"] = tensors[f"{Q}.{end}"][:5].contiguous()

    for name in ("gptq", "awq"):
        there = changed(coded(name), tmp_path / name, cut)
        with pytest.raises(ModelError, match=rf"{Q}\.scales float16 \[5, 128\] does not divide 96 columns"):
            start(there)


@pytest.mark.parametrize(("name", "end"), [("modelopt nvfp4", "weight_scale_2"), ("ct nvfp4", "weight_global_scale")])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_a_matrix_that_is_none(
    coded: Callable[[str], Path], tmp_path: Path, name: str, end: str, value: float
) -> None:
    """Of NVFP4, where scales of blocks may be 0."""
    there = changed(coded(name), tmp_path / "x", lambda tensors: tensors[f"{Q}.{end}"].fill_(value))
    with pytest.raises(ModelError, match=rf"{Q}\.{end} float32 \[1?\] has a scale of {value}"):
        start(there)


def test_inputs_that_are_scaled(coded: Callable[[str], Path], tmp_path: Path) -> None:
    def scale(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.pre_quant_scale"] = torch.ones(96)

    there = changed(coded("modelopt nvfp4"), tmp_path / "x", scale)
    with pytest.raises(ModelError, match=rf"{Q}\.pre_quant_scale float32 \[96\] scales the inputs"):
        start(there)


@pytest.mark.parametrize("family", ["dense", "transformers"])
def test_codes_that_no_format_explains(coded: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """AWQ's config, and a matrix in float8."""

    def mix(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    there = changed(coded("awq"), tmp_path / "x", mix)
    with pytest.raises(ModelError, match=r"lm_head\.weight .* is stored as float8_e4m3fn, and nothing says"):
        start(there, use=family)


def numbers(directory: Path) -> Tensor:
    """The exact numbers of a matrix in compressed-tensors' formats."""
    config = json.loads((directory / "config.json").read_text("utf-8"))["quantization_config"]
    matrix = CompressedTensors(NoOptions(), FormatContext(config, slots_of(directory))).matrices()[f"{Q}.weight"]
    matrix.check()
    found = torch.empty(matrix.shape)
    matrix.fill(found)
    return found


def test_scales_of_integers_may_be_negative(coded: Callable[[str], Path], tmp_path: Path) -> None:
    """AutoRound writes such."""
    there = changed(coded("ct 4 bits"), tmp_path / "x", lambda tensors: tensors[f"{Q}.weight_scale"].neg_())
    assert torch.equal(numbers(there), -numbers(coded("ct 4 bits")))


def test_zero_biases_of_matrices_without_any(coded: Callable[[str], Path], tmp_path: Path) -> None:
    """AutoGPTQ wrote them; one that is not zero has no place."""
    for value in (0.0, 1.0):

        def bias(tensors: dict[str, Tensor], value: float = value) -> None:
            tensors[f"{Q}.bias"] = torch.full((96,), value, dtype=torch.float16)

        there = changed(coded("gptq"), tmp_path / str(value), bias)
        if value:
            with pytest.raises(ModelError, match=rf"{Q}\.bias \[96\] has no place in this model"):
                start(there)
        else:
            start(there)


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        (
            "fp8 blocks",
            {"quant_method": "aqlm"},
            "quantised (quant_method 'aqlm'), in a way that is not",
        ),
        ("fp8 blocks", {"quant_method": None}, "fp8: it reads quant_method fp8 and fbgemm_fp8"),
        ("awq", {"version": "gemv"}, "awq: its version is gemv, and only gemm is supported"),
        ("awq", {"bits": 3}, "awq: it has 3 bits, and 4 are supported"),
        ("gptq", {"bits": 2}, "gptq: it has 2 bits, and 4 and 8 are supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq: its checkpoint_format is marlin"),
        ("ct 4 bits", {"format": "marlin-24"}, "compressed_tensors: its format is marlin-24"),
        ("ct 4 bits", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
        (
            "ct 4 bits",
            {
                "transform_config": {
                    "config_groups": {"u": {"apply": [{"location": "input"}, {"location": "weight_output"}]}}
                }
            },
            "its transform_config changes activations (input)",
        ),
        ("ct 4 bits", {"format": "mxfp8-quantized"}, "its format is mxfp8-quantized"),
        ("modelopt fp8", {"quant_algo": "W4A8_AWQ"}, "MIXED_PRECISION, not 'W4A8_AWQ'"),
    ],
)
def test_other_formats(
    coded: Callable[[str], Path], tmp_path: Path, name: str, config: Mapping[str, object], reason: str
) -> None:
    there = changed(coded(name), tmp_path / "x", lambda tensors: None, **config)
    with pytest.raises(ConfigError, match="no provider of weight_format can be used") as caught:
        start(there)
    assert reason in str(caught.value)


def test_config_check_tells(coded: Callable[[str], Path], tmp_path: Path) -> None:
    """Before a start, for a model that is a directory."""
    run = CliRunner().invoke
    assert run(app, ["config", "check", str(coded("awq"))]).stdout.startswith("ok ")
    there = changed(coded("awq"), tmp_path / "x", lambda tensors: None, quant_method="aqlm")
    (problem,) = json.loads(run(app, ["config", "check", str(there), "--json"]).stdout)["problems"]
    assert problem["path"] == "quantization.format.use"
    assert "(quant_method 'aqlm'), in a way that is not supported" in problem["message"]
    there = changed(coded("awq"), tmp_path / "y", lambda tensors: tensors.pop(f"{Q}.scales"))
    (problem,) = json.loads(run(app, ["config", "check", str(there), "--json"]).stdout)["problems"]
    assert problem["path"] == "model.path"
    assert problem["message"] == f"the checkpoint lacks {Q}.scales, which {Q}.qweight needs"


def test_without_the_plugin(coded: Callable[[str], Path]) -> None:
    """As if there were none: families refuse."""
    with pytest.raises(ConfigError, match=r"quantised checkpoints .* are not supported") as caught:
        start(coded("awq"), plugins={"quantization": False})
    assert "has quantised weights, which are not read here" in str(caught.value)
