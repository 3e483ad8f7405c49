"""The files of the model's directory: configs, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import Qwen3VLConfig

from examples.shapes.chats import all_texts

HERE = Path(__file__).parent
MODEL = HERE / "model"
VOCABULARY = 480
PATCH = 16
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# As in transformers' Qwen2Tokenizer, which may build the tokenizer anew from its vocabulary.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of VOCABULARY tokens, trained on the texts of chats. Special ones come last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def build_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """Return the config of a model with less than three million parameters."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": PATCH,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def image_settings(least: int = 6 * 32**2, most: int = 18 * 32**2) -> dict[str, object]:
    """Return preprocessor_config.json; `least` and `most` are the pixels of a resized picture."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything but config.json and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    video = {**image_settings(), "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    video["size"] = {"shortest_edge": 6 * 32**2, "longest_edge": 16 * 18 * 32**2}
    texts = {
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 1024,
            "clean_up_tokenization_spaces": False,
            "chat_template": (HERE / "chat_template.jinja").read_text("utf-8"),
        },
        "generation_config.json": {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad},
        "preprocessor_config.json": image_settings(),
        "video_preprocessor_config.json": video,
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
