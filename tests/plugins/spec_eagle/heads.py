"""Random EAGLE heads for the tiny Llama of the tests, in the layouts that checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 320, 64, 128, 4, 2, 16, 3
"""Of `tiny_checkpoint(..., "llama")`."""

DECODER: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Head:
    """What a checkpoint is like. `config` is added to config.json, `decoder` to the decoder's part of it; `layer` is
    what the layer is called. `less` and `more` are tensors, the latter by shape.
    """

    architecture: str = "LlamaForCausalLMEagle3"
    config: Mapping[str, Any] = field(default_factory=dict)
    decoder: Mapping[str, Any] = field(default_factory=dict)
    layer: str = "midlayer"
    prefix: str = ""
    draft_vocab: int | None = 96
    taps: int = 3
    hidden: int = HIDDEN
    target: int = HIDDEN
    vocab: int = VOCAB
    less: tuple[str, ...] = ()
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def eagle3(self) -> bool:
        return self.architecture != "LlamaForCausalLMEagle"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its plain name."""
        hidden, at = self.hidden, self.layer
        width = 2 * hidden if self.eagle3 else hidden
        found = {
            "fc.weight": (hidden, self.taps * self.target if self.eagle3 else 2 * hidden),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
            f"{at}.self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": (INTER, hidden),
            f"{at}.mlp.up_proj.weight": (INTER, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, INTER),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        if self.eagle3:
            found |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.hidden_norm.weight": (hidden,)}
            found |= {"norm.weight": (hidden,)}
            if self.draft_vocab is not None:
                found |= {"lm_head.weight": (self.draft_vocab, hidden)}
        found |= dict(self.more)
        return {name: shape for name, shape in found.items() if name not in self.less}

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Write the checkpoint into `directory`. Norms lie around 1, and matrices keep the size of what they read."""
        directory.mkdir(parents=True, exist_ok=True)
        decoder = {
            **DECODER,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "head_dim": HEAD_DIM,
            **self.decoder,
        }
        if self.architecture == "Eagle3Speculator":
            config: dict[str, Any] = {"transformer_layer_config": decoder, "speculators_model_type": "eagle3"}
        else:
            config = decoder
        config |= {"architectures": [self.architecture], "draft_vocab_size": self.draft_vocab, **self.config}
        (directory / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in sorted(self.shapes().items()):
            drawn = torch.randn(shape, generator=generator)
            # A head that is sure of itself drafts deep trees.
            scale = 12.0 if "lm_head" in name else 2.0
            tensors[name] = 1 + 0.2 * drawn if "norm" in name else drawn * (scale / shape[-1] ** 0.5)
        if self.eagle3 and self.draft_vocab not in (None, self.vocab) and "d2t" not in self.less:
            ids = torch.randperm(self.vocab, generator=generator)[: self.draft_vocab].sort().values
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill_(0, ids, True)
        save_file({f"{self.prefix}{name}": one for name, one in tensors.items()}, directory / "model.safetensors")
        return directory


_QK_NORMS = {"layers.0.self_attn.q_norm.weight": (HEAD_DIM,), "layers.0.self_attn.k_norm.weight": (HEAD_DIM,)}
_BIASES = {
    "fc.bias": (HIDDEN,),
    "midlayer.self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
    "midlayer.self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
    "midlayer.self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
    "midlayer.self_attn.o_proj.bias": (HIDDEN,),
    "midlayer.mlp.gate_proj.bias": (INTER,),
    "midlayer.mlp.up_proj.bias": (INTER,),
    "midlayer.mlp.down_proj.bias": (HIDDEN,),
}

DEMO = Head(hidden=576, target=576, vocab=49152, draft_vocab=1024, config={"rope_theta": 100000.0})
"""A small head for the demo model."""

SPECULATORS = Head("Eagle3Speculator", layer="layers.0")

HEADS_BY_NAME: Mapping[str, Head] = {
    "eagle3": Head(),
    "eagle": Head("LlamaForCausalLMEagle", layer="layers.0", more={"fc.bias": (HIDDEN,)}),
    "eagle_with_norms": Head(
        "LlamaForCausalLMEagle",
        layer="layers.0",
        prefix="model.",
        more={
            "layers.0.input_layernorm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB, HIDDEN),
        },
    ),
    "all_ids": Head(draft_vocab=None),
    "own_embeddings": Head(draft_vocab=VOCAB, more={"embed_tokens.weight": (VOCAB, HIDDEN)}),
    "smaller": Head(
        hidden=48, config={"target_hidden_size": HIDDEN}, more={"embed_tokens.weight": (VOCAB, 48)}, draft_vocab=50
    ),
    "biases": Head(more=_BIASES),
    "speculators": SPECULATORS,
    "norm_before_residual": Head("Eagle3Speculator", layer="layers.0", config={"norm_before_residual": True}),
    "norm_before_fc": Head(
        "Eagle3Speculator",
        layer="layers.0",
        config={"norm_before_fc": True},
        more={"input_norm.weight": (3 * HIDDEN,)},
    ),
    "norms": Head(
        "Eagle3Speculator",
        layer="layers.0",
        config={"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 2]},
        taps=2,
        more={"fc_norm.0.weight": (HIDDEN,), "fc_norm.1.weight": (HIDDEN,)},
    ),
    "qwen3": Head("Eagle3Speculator", layer="layers.0", decoder={"model_type": "qwen3"}, more=_QK_NORMS),
}
