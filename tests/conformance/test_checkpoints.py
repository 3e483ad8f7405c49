"""Tiny checkpoints build once, are what they were asked to be, and can be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pegboard.conformance.checkpoints import ARCHITECTURES, VOCAB_SIZE, tiny_checkpoint
from pegboard.toolkit.text.tokenizer import Tokenizer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_is_a_whole_model_directory(architecture: str, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, architecture, num_hidden_layers=2)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, VOCAB_SIZE)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    text = "Zwölf Boxkämpfer 漢 🙂\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim == 1:
            assert tensor.std() > 0.01, f"{name} is constant, so ignoring it would not show"


def test_the_same_arguments_find_the_same_folder(tmp_path: Path) -> None:
    first = tiny_checkpoint(tmp_path, "llama")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_checkpoint(tmp_path, "llama") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert tiny_checkpoint(tmp_path, "llama", seed=1) != first
    assert tiny_checkpoint(tmp_path, "llama", hidden_size=32) != first
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_seeds_are_reproducible(tmp_path: Path) -> None:
    one, two = (tiny_checkpoint(tmp_path / name, "qwen3", seed=3) / "model.safetensors" for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()


def test_shards(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "mistral", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert (directory / "model.safetensors.index.json").is_file()


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown architecture 'lama'; known: llama, mistral"):
        tiny_checkpoint(tmp_path, "lama")
