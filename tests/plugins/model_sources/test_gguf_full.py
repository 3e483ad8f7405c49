"""The demo model's conversion against transformers' own reading of the same GGUF file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.toolkit.text.demo import CHATS, STRINGS, demo_directory, demo_gguf

pytestmark = [pytest.mark.full, pytest.mark.slow]


def load_gguf(model: Any = None) -> Any:
    """What transformers reads, by the reader beneath ``from_pretrained(gguf_file=...)``, which asks for accelerate."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    return load_gguf_checkpoint(demo_gguf(), return_tensors=model is not None, model_to_load=model)


def test_weights_are_equal() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**load_gguf()["config"]))
    theirs = load_gguf(model)["tensors"]
    ours = {name: tensor for file in demo_directory().glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_configs_mean_the_same() -> None:
    from transformers import AutoConfig

    ours, theirs = AutoConfig.from_pretrained(demo_directory()), load_gguf()["config"]
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "bos_token_id"):
        assert getattr(ours, key) == theirs[key], key
    assert ours.tie_word_embeddings == theirs["tie_word_embeddings"]
    assert ours.rope_parameters == {"rope_type": "default", "rope_theta": theirs["rope_theta"]}
    assert torch.tensor(ours.rms_norm_eps) == torch.tensor(theirs["rms_norm_eps"])


def test_tokenizers_are_equal() -> None:
    """But for one thing: transformers does not know SmolLM's pre-tokenizer, which sets every digit apart.

    So runs of spaces before a digit differ; there ours agrees with llama.cpp and the model's own tokenizer.json.
    """
    from transformers import AutoTokenizer

    file = demo_gguf()
    other = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = Tokenizer.from_directory(demo_directory())
    digits = [text for text in STRINGS if any(char.isnumeric() for char in text)]
    assert 3 < len(digits) < len(STRINGS) - 10
    for text in STRINGS:
        if text not in digits:
            assert ours.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == other.decode(ours.encode(text), skip_special_tokens=True)
    for chat in CHATS:
        text = ours.apply_chat_template(chat)
        assert text == other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    spaced = ours.encode("a  1", add_special_tokens=False)
    pieces = [ours.id_to_token(token) for token in spaced]
    assert pieces == ["a", "ĠĠ", "1"]
    assert json.loads((demo_directory() / "tokenizer.json").read_text("utf-8"))["pre_tokenizer"]["type"] == "Sequence"
