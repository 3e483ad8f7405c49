"""The tiny Qwen-VL checkpoints are what transformers takes them for, however they are spelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from pegboard.conformance.vl_checkpoints import (
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    VL_FAMILIES,
    VL_VOCAB_SIZE,
    vl_checkpoint,
)


def _load(directory: Path) -> transformers.PreTrainedModel:
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), f"{directory}: {info}"
    return model


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_spellings_hold_the_same_model(family: str, tmp_path: Path) -> None:
    new = vl_checkpoint(tmp_path, family, names="new")
    assert vl_checkpoint(tmp_path, family, names="new") == new
    hub = vl_checkpoint(tmp_path, family, names="hub", max_shard_size="100KB")
    assert len(list(hub.glob("*.safetensors"))) > 1
    one, other = _load(new).state_dict(), _load(hub).state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_old_names_differ_from_new_ones_in_their_beginnings(tmp_path: Path) -> None:
    from safetensors import safe_open

    for family in VL_FAMILIES:
        with safe_open(vl_checkpoint(tmp_path, family, names="old") / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert {name.split(".")[0] for name in names} == {"visual", "model"}
        assert not any(name.startswith(("model.visual", "model.language_model")) for name in names)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    directory = vl_checkpoint(tmp_path, "qwen3_vl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    assert len(tokenizer) == VL_VOCAB_SIZE == config["text_config"]["vocab_size"]
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    assert tokenizer.convert_tokens_to_ids(marks) == [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
    assert [config[key] for key in keys] == [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}, {"type": "text", "text": "b"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    middle = "<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\na{middle}b<|im_end|>\n"


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen2_5_vl"):
        vl_checkpoint(tmp_path, "qwen9_vl")
