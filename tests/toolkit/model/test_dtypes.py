"""`model.dtype: auto` by checkpoint, device and CPU; what it decides does not depend on providers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.toolkit.model import dtypes as precision
from pegboard.toolkit.model.dtypes import cpu_has_bfloat16, own_dtype, resolve_dtype, resolve_kv_dtype
from tests.toolkit.text.demo import demo_directory

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def auto(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], device: torch.device, native: bool) -> torch.dtype:
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: native)
    return resolve_dtype("auto", Path("/nowhere"), config, device)


@pytest.mark.parametrize(
    ("own", "native", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("float16", True, torch.bfloat16),
        ("float32", True, torch.float32),
        ("float64", True, torch.float32),
        ("bfloat16", False, torch.float32),
        ("float16", False, torch.float32),
        ("float32", False, torch.float32),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch, key: str, own: str, native: bool, expected: torch.dtype) -> None:
    assert auto(monkeypatch, {key: own}, CPU, native) == expected


@pytest.mark.parametrize("own", ["bfloat16", "float16", "float32"])
def test_on_a_gpu_it_is_the_checkpoints_own(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    assert auto(monkeypatch, {"dtype": own}, GPU, False) == getattr(torch, own)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_type_that_is_named_is_taken(name: str) -> None:
    assert resolve_dtype(name, Path("/nowhere"), {"dtype": "nonsense"}, CPU) == getattr(torch, name)


@pytest.mark.parametrize("name", ["nonsense", "auto", "nn", "int8"])
def test_an_unknown_type_is_an_error_unless_a_cpu_goes_by_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    save_file({"a": torch.zeros(8, 8, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert resolve_dtype("auto", tmp_path, {"dtype": name}, CPU) in (torch.bfloat16, torch.float32)
    assert (
        f"config.json: dtype {name!r} is not a type to compute with; set model.dtype; the weights are float16"
        in caplog.text
    )
    with pytest.raises(ModelError, match=rf"dtype '{name}' is not a type to compute with; set model\.dtype"):
        resolve_dtype("auto", tmp_path, {"dtype": name}, GPU)


def test_codes_of_quantised_weights_do_not_count(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(9, 9).to(torch.float8_e4m3fn), "b": torch.zeros(9, 9, dtype=torch.int32)}
    save_file({**tensors, "c": torch.zeros(9, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert resolve_dtype("auto", tmp_path, {}, GPU) is torch.float16


def test_the_log_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        auto(monkeypatch, {"dtype": "bfloat16"}, CPU, False)
        auto(monkeypatch, {"dtype": "float16"}, CPU, True)
    assert caplog.messages == [
        "model.dtype: float32, automatic; the checkpoint is bfloat16, and this CPU has no instructions for bfloat16",
        "model.dtype: bfloat16, automatic; the checkpoint is float16",
    ]


def test_a_config_that_says_nothing_leaves_it_to_the_weights(tmp_path: Path) -> None:
    matrix, norm = torch.zeros(8, 8, dtype=torch.bfloat16), torch.zeros(8)
    assert own_dtype(tmp_path, {}) == torch.float32
    save_file({"a": matrix, "b": norm}, tmp_path / "model.safetensors")
    assert own_dtype(tmp_path, {}) == torch.bfloat16
    assert own_dtype(tmp_path, {"text_config": {"dtype": "float16"}}) == torch.float16
    save_file({"a": matrix.to(torch.int32), "b": norm}, tmp_path / "model.safetensors")
    assert own_dtype(tmp_path, {}) == torch.float32


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": True, "amx_bf16": True}, True),
        ({"architecture": "aarch64", "bf16": True}, False),
        ({}, False),
    ],
)
def test_by_the_cpus_capabilities(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cpu_has_bfloat16() is expected


def test_the_demo_is_no_float32_model() -> None:
    """Its file is 4-bit and its publication bfloat16; float32 is only how the converter stores it."""
    directory = demo_directory()
    assert own_dtype(directory, json.loads((directory / "config.json").read_text("utf-8"))) == torch.bfloat16


MADE_FOR_IT = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}


@pytest.mark.parametrize(
    ("name", "config", "device", "able", "expected"),
    [
        ("auto", {}, GPU, True, torch.bfloat16),
        ("auto", MADE_FOR_IT, GPU, True, torch.float8_e4m3fn),
        ("auto", MADE_FOR_IT, GPU, False, torch.bfloat16),
        ("auto", MADE_FOR_IT, CPU, True, torch.bfloat16),
        ("fp8_e4m3", {}, CPU, False, torch.float8_e4m3fn),
        ("fp8_e5m2", MADE_FOR_IT, GPU, True, torch.float8_e5m2),
        ("float16", MADE_FOR_IT, GPU, True, torch.float16),
        ("bfloat16", MADE_FOR_IT, GPU, True, torch.bfloat16),
    ],
)
def test_the_type_of_kv(
    name: str, config: dict[str, Any], device: torch.device, able: bool, expected: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The model's unless something else is said, by the config or, on a GPU, by the checkpoint; the log tells."""
    model = ModelContext(Path("/nowhere"), config, torch.bfloat16, device)
    with caplog.at_level(logging.INFO):
        assert resolve_kv_dtype(name, model, able=able) is expected
    assert ("memory.kv_dtype" in caplog.text) is (name == "auto" and bool(config))
