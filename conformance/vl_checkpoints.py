"""Tiny random checkpoints of models that see: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE in Hugging Face's layout.

Each has a text and a vision part, a processor's settings, a tokenizer with the special tokens of media, and a chat
template that takes content parts. transformers and torch are imported when a checkpoint is built, not before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pegboard.conformance.checkpoints import built_once, write_tiny_tokenizer

VL_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The names that `vl_checkpoint` takes."""

VL_VOCAB_SIZE = 400
"""Tokens of the tokenizer: eight special ones, 256 bytes, and merges."""

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 3, 4, 6, 7
"""Ids of <|vision_start|>, <|vision_end|>, <|image_pad|> and <|video_pad|>, which the config names."""

VL_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Names = Literal["new", "hub", "old"]

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

_CLASSES = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
}

_TEXT: dict[str, Any] = {
    "vocab_size": VL_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_ROPE2 = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_ROPE3 = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_TEXT3 = {"head_dim": 16, "rope_parameters": _ROPE3}

# 48 and not 64, so that no expert's matrix is square: only then does transformers see which way round one is saved.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}

_TEXT_OF: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": _ROPE2},
    "qwen2_5_vl": {"rope_parameters": _ROPE2},
    "qwen3_vl": _TEXT3,
    "qwen3_vl_moe": {**_TEXT3, **_EXPERTS, "mlp_only_layers": []},
}

_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.08,
}

_VISION3 = {
    "patch_size": 16,
    "intermediate_size": 128,
    "out_hidden_size": 64,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}

_VISION_OF: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"patch_size": 14, "embed_dim": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "patch_size": 14,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "qwen3_vl": _VISION3,
    "qwen3_vl_moe": _VISION3,
}

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def vl_checkpoint(
    directory: str | os.PathLike[str],
    family: str,
    *,
    names: Names = "new",
    seed: int = 0,
    max_shard_size: str = "5GB",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Return a random float32 checkpoint of `family`, in a folder of its own under `directory`.

    `names` says how tensors and config.json are spelled; one seed has the same weights in all:

    - "new": as transformers does today: `model.visual.*` and `model.language_model.*`, a nested config.
    - "hub": as the families' checkpoints on the hub. Qwen2-VL and 2.5-VL: `visual.*` and `model.*`, a flat config with
      `rope_scaling` and `in_chans`. Qwen3-VL: tensors as in "new", `rope_scaling`, experts transposed.
    - "old": `visual.*` and `model.*` for every family, the rest as in "hub". transformers reads no such Qwen3-VL.

    `text` and `vision` are fields of the nested configs, `overrides` of the outer one (``tie_word_embeddings=False``;
    tied by default); `max_shard_size` as in `tiny_checkpoint`. Biases and norms are random too. Pictures have 4 to 256
    tokens by the processor's settings. The folder is built once, as `tiny_checkpoint` says. Raises ValueError for an
    unknown family.
    """
    if family not in _CLASSES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(VL_FAMILIES)}")
    settings = _settings(family, text or {}, vision or {}, overrides)
    identity = json.dumps([family, names, seed, max_shard_size, settings], sort_keys=True, default=str)
    name = f"{family}-{names}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def build(scratch: Path) -> None:
        _save_model(scratch, family, settings, names, seed, max_shard_size)
        write_processor(scratch, family)
        write_tiny_tokenizer(scratch, VL_CHAT_TEMPLATE, more_special=_SPECIAL, vocab_size=VL_VOCAB_SIZE)

    return built_once(Path(directory) / name, build)


def write_processor(directory: Path, family: str, **overrides: Any) -> None:
    """Write preprocessor_config.json, and video_preprocessor_config.json where the family has one, with `overrides`
    in both.
    """
    patch = int(_VISION_OF[family]["patch_size"])
    area = (2 * patch) ** 2
    common = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    if not _is_qwen3(family):
        image = {"image_processor_type": "Qwen2VLImageProcessor", **_CLIP, **common}
        image |= {"min_pixels": 4 * area, "max_pixels": 256 * area}
        _write(directory / "preprocessor_config.json", image | overrides)
        return
    image = {"image_processor_type": "Qwen2VLImageProcessorFast", **_HALF, **common}
    image["size"] = {"shortest_edge": 4 * area, "longest_edge": 256 * area}
    _write(directory / "preprocessor_config.json", image | overrides)
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **_HALF, **common}
    video["size"] = {"shortest_edge": 8 * area, "longest_edge": 1024 * area}
    _write(directory / "video_preprocessor_config.json", video | overrides)


def _settings(
    family: str, text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    outer = {
        "tie_word_embeddings": True,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        **overrides,
    }
    return {
        **outer,
        "text_config": {**_TEXT, **_TEXT_OF[family], **text},
        "vision_config": {**_VISION, **_VISION_OF[family], **vision},
    }


def _save_model(
    directory: Path, family: str, settings: Mapping[str, Any], names: Names, seed: int, max_shard_size: str
) -> None:
    import torch
    import transformers

    prefix = _CLASSES[family]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).to(torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    for file in sorted(directory.glob("*.safetensors")):
        _respell(file, family, names)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        value = json.loads(index.read_text("utf-8"))
        value["weight_map"] = {spelled(name, family, names): file for name, file in value["weight_map"].items()}
        _write(index, value)
    if names != "new":
        path = directory / "config.json"
        _write(path, _hub_config(family, json.loads(path.read_text("utf-8"))))


def spelled(name: str, family: str, names: Names) -> str:
    """Return the name of a tensor, whichever way it is spelled, as a checkpoint with `names` has it."""
    bare = re.sub(r"^model\.(?=visual\.)", "", name)
    bare = re.sub(r"^model\.language_model\.", "model.", bare)
    if names == "old" or (names == "hub" and not _is_qwen3(family)) or bare.startswith("lm_head."):
        return bare
    return f"model.{bare}" if bare.startswith("visual.") else re.sub(r"^model\.", "model.language_model.", bare)


def _is_qwen3(family: str) -> bool:
    return family.startswith("qwen3")


def _respell(file: Path, family: str, names: Names) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        turned = names != "new" and ".mlp.experts." in name
        tensors[spelled(name, family, names)] = tensor.transpose(1, 2).contiguous() if turned else tensor
    save_file(tensors, file, metadata={"format": "pt"})


def _hub_config(family: str, config: dict[str, Any]) -> dict[str, Any]:
    text, vision = config["text_config"], config["vision_config"]
    rope = dict(text.pop("rope_parameters"))
    text["rope_theta"] = rope.pop("rope_theta")
    for key in ("layer_types", "dtype"):
        text.pop(key, None)
    vision.pop("rope_parameters", None)
    if _is_qwen3(family):
        text["rope_scaling"] = rope
        if "num_local_experts" in text:
            text["num_experts"] = text.pop("num_local_experts")
        vision["model_type"] = family
        return config
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision["in_chans"] = vision.pop("in_channels")
    vision["spatial_patch_size"] = vision["patch_size"]
    vision.pop("model_type")
    del config["text_config"]
    return {**text, **config}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
