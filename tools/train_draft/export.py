"""Writing a head as SpecForge and SGLang do, and a card that says where it comes from."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from pegboard.tools.train_draft.data import Vocabulary, save_tensors
from pegboard.tools.train_draft.draft import Draft, DraftShape
from pegboard.tools.train_draft.workdir import write_json

ARCHITECTURE = "LlamaForCausalLMEagle3"


def begin(draft: Draft, lent: dict[str, Tensor], vocabulary: Vocabulary, seed: int) -> None:
    """Give a new head the weights that it begins with: those of the model's last layer, final norm and head where
    shapes allow, and small random numbers elsewhere. The state that it reads is the last of the tapped ones at first,
    and embeddings count next to nothing.
    """
    chance = torch.Generator().manual_seed(seed)
    hidden = draft.shape.hidden
    start = {name.removeprefix("start."): value.float() for name, value in lent.items() if name.startswith("start.")}
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=chance) * 0.02)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
        layer, attention = draft.midlayer, draft.midlayer.self_attn
        for name, projection in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
            _copy(projection.weight[:, hidden:], start.get(f"self_attn.{name}_proj"))
        _copy(attention.o_proj.weight, start.get("self_attn.o_proj"))
        _copy(layer.hidden_norm.weight, start.get("input_layernorm"))
        _copy(layer.post_attention_layernorm.weight, start.get("post_attention_layernorm"))
        for name, part in (("gate", layer.mlp.gate_proj), ("up", layer.mlp.up_proj), ("down", layer.mlp.down_proj)):
            _copy(part.weight, start.get(f"mlp.{name}_proj"))
        _copy(draft.norm.weight, start.get("norm"))
        if "head" in start:
            _copy(draft.lm_head.weight, start["head"][torch.searchsorted(lent["ids"], vocabulary.ids)])


def _copy(weight: Tensor, given: Tensor | None) -> None:
    if given is not None and given.shape == weight.shape:
        weight.copy_(given)


def head_config(shape: DraftShape, rope: dict[str, object]) -> dict[str, object]:
    """Return the head's config.json. The ids of `eagle_config` are those of the layers whose outputs are read."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "rms_norm_eps": shape.eps,
        **rope,
        "max_position_embeddings": shape.rope.max_position,
        "hidden_act": shape.act,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [place - 1 for place in shape.taps]},
    }


def export(directory: Path, draft: Draft, vocabulary: Vocabulary, rope: dict[str, object]) -> None:
    """Write model.safetensors and config.json: the weights in bfloat16, `d2t` int64 and `t2d` bool."""
    tensors = {name: weight.detach().to(torch.bfloat16) for name, weight in draft.state_dict().items()}
    tensors |= {"d2t": vocabulary.d2t(), "t2d": vocabulary.t2d()}
    save_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
    write_json(directory / "config.json", head_config(draft.shape, rope))


def exported(directory: Path, draft: Draft) -> Draft:
    """Give a head the weights that were written, rounded as they are there. Returns it."""
    stored = load_file(str(directory / "model.safetensors"))
    draft.load_state_dict({name: weight.float() for name, weight in stored.items() if name not in ("d2t", "t2d")})
    return draft
