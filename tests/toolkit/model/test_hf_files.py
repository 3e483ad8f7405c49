"""The small files around a model, and where caches go."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.hf_files import eos_token_ids, read_json_object
from pegboard.toolkit.model.kv_config import kept_in_eight_bits
from pegboard.toolkit.model.model_config import read_model_config
from pegboard.toolkit.system.cache_dir import default_cache_dir


def test_absent_files_are_empty_objects(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "nothing.json") == {}
    assert eos_token_ids(tmp_path) == frozenset()


def test_numbers_that_json_has_not_got(tmp_path: Path) -> None:
    """As transformers writes them; another object of one key stays what it is."""
    text = '{"a": {"__float__": "Infinity"}, "b": [{"__float__": "-Infinity"}], "c": {"__float__": "ten"}, "d": {}}'
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    expected = {"a": math.inf, "b": [-math.inf], "c": {"__float__": "ten"}, "d": {}}
    assert read_json_object(tmp_path / "config.json") == expected
    (tmp_path / "config.json").write_text('{"__float__": "NaN"}', encoding="utf-8")
    with pytest.raises(ModelError, match="must hold a JSON object, found float"):
        read_json_object(tmp_path / "config.json")


def test_a_model_whose_config_has_an_infinite_number(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_model_config(tmp_path)["time_step_limit"] == [0.0, math.inf]


FP8_KV = {"kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("own", "apart", "expected"),
    [
        (None, {"quant_algo": "FP8", **FP8_KV}, {"quant_algo": "FP8", **FP8_KV}),
        (None, {"quant_algo": None, **FP8_KV}, {"quant_algo": None, **FP8_KV}),
        ({}, FP8_KV, FP8_KV),
        ({"quant_method": "awq"}, {"quant_algo": "FP8"}, {"quant_method": "awq"}),
        (None, {"quant_algo": None, "kv_cache_quant_algo": None}, None),
        (None, "FP8", None),
    ],
)
def test_what_modelopt_keeps_in_a_file_of_its_own(own: Any, apart: Any, expected: Any, tmp_path: Path) -> None:
    """Weights and KV are told of in one place, whichever file says it."""
    config = {"architectures": ["LlamaForCausalLM"]} | ({} if own is None else {"quantization_config": own})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    told = {"producer": {"name": "modelopt"}, "quantization": apart}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told), encoding="utf-8")
    found = read_model_config(tmp_path)
    assert found.get("quantization_config") == expected
    assert kept_in_eight_bits(found) == (expected is not None and "kv_cache_quant_algo" in expected)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "must hold a JSON object, found list")]
)
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"config\.json {message}"):
        read_json_object(tmp_path / "config.json")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGBOARD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/pegboard")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/pegboard")
    monkeypatch.setenv("PEGBOARD_CACHE", "~/models")
    assert default_cache_dir() == Path("/home/someone/models")
