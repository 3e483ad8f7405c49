"""The models that are measured: random, of Qwen3-VL's architecture, and the text tower of one as a model of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pegboard.conformance.vl_checkpoints import vl_checkpoint, write_processor

FAMILY = "qwen3_vl"
PREFIX = "model.language_model."
_ROPE = {"rope_type": "default", "rope_theta": 5e6}
_SECTIONS = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
_COMMON = {"head_dim": 64, "max_position_embeddings": 32768, "initializer_range": 0.02}
TEXT: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "large": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
VISION: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 512, "num_heads": 2, "depth": 2},
    "large": {"hidden_size": 384, "intermediate_size": 1536, "num_heads": 6, "depth": 3},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "depth": 2},
}
LARGEST = 16 * 2**20
"""Pixels of a resized picture, at most: a megapixel stays what it is."""


def seeing_model(directory: Path, size: str, depth: int | None = None) -> Path:
    """Return a checkpoint of this size that takes pictures; its vision tower has so many layers."""
    text = {**_COMMON, **TEXT[size], "rope_parameters": {**_ROPE, **_SECTIONS}}
    vision = {**VISION[size], "out_hidden_size": text["hidden_size"], "num_position_embeddings": 48 * 48}
    vision["depth"] = depth or vision["depth"]
    vision["deepstack_visual_indexes"] = [0, vision["depth"] - 1]
    path = vl_checkpoint(directory, FAMILY, text=text, vision=vision)
    write_processor(path, FAMILY, size={"shortest_edge": 4096, "longest_edge": LARGEST})
    return path


def text_tower(seeing: Path, directory: Path) -> Path:
    """Return the text tower of a model as a checkpoint that knows of no pictures, with the same weights."""
    from safetensors.torch import load_file, save_file

    path = directory / f"{seeing.name}-text"
    path.mkdir(parents=True)
    for file in seeing.glob("*.safetensors"):
        tensors = {
            f"model.{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else name: tensor
            for name, tensor in load_file(file).items()
            if ".visual." not in name
        }
        save_file(tensors, path / file.name, metadata={"format": "pt"})
    for file in seeing.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "generation_config", "chat_template")):
            shutil.copy(file, path / file.name)
    config = json.loads((seeing / "config.json").read_text("utf-8"))
    text = {**config["text_config"], "rope_parameters": _ROPE, "tie_word_embeddings": config["tie_word_embeddings"]}
    text |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (path / "config.json").write_text(json.dumps(text, indent=2), "utf-8")
    return path
