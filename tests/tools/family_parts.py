"""What tiny checkpoints of families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCAB = 512


@dataclass(frozen=True)
class Family:
    """`prefix` is that of the config's class, `model` the model's where AutoModelForCausalLM has none. A config that
    does not say how long the context may be needs `context_length`.
    """

    prefix: str
    fields: Mapping[str, Any]
    model: str | None = None
    context_length: int | None = None


BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**BASE, "num_key_value_heads": 2}
MOE: dict[str, Any] = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
