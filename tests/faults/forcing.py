"""A model, and adapters each of which makes it write a token of its own, whatever the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.plugins.adapters.peft_files import CONFIG, write_files

LAYER = 1
HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 16, 64
CONSTANT = 1.0
"""The first number of every embedding, which no layer changes. The others' deviation is 0.2."""
STRENGTH = 200.0


@dataclass(frozen=True)
class _Drawn:
    """A matrix, the token that it makes, and by how much that one is ahead of the next."""

    ahead: float
    token: int
    b: torch.Tensor


class Forced:
    """A tiny Llama whose first number of the residual stream is always the same, and positive: so an adapter of the
    last layer's values adds the same to every token, and so much that nothing else counts.
    """

    def __init__(self, directory: Path) -> None:
        sizes: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
        }
        self.path = tiny_checkpoint(directory, "llama", num_hidden_layers=LAYER + 1, **sizes)
        file = self.path / "model.safetensors"
        self._tensors = tensors = load_file(file)
        tensors["model.embed_tokens.weight"][:, 0] = CONSTANT
        for layer in range(LAYER + 1):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{name}.weight"][0] = 0.0
        save_file(tensors, file, metadata={"format": "pt"})
        self._draw = torch.Generator().manual_seed(1)

    def adapter(self, directory: Path, taken: set[int]) -> tuple[Path, int]:
        """Write an adapter; return it with its token, which is none of those `taken`."""
        drawn = [one for one in (self._drawn() for _ in range(200)) if one.token not in taken]
        best = max(drawn, key=lambda one: one.ahead)
        name = f"model.layers.{LAYER}.self_attn.v_proj"
        a = torch.zeros(1, HIDDEN)
        a[0, 0] = self._tensors[f"model.layers.{LAYER}.input_layernorm.weight"][0].sign()
        halves = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": best.b}
        write_files(
            directory,
            {**CONFIG, "r": 1, "lora_alpha": 1, "target_modules": ["v_proj"], "layers_to_transform": [LAYER]},
            halves,
        )
        return directory, best.token

    def _drawn(self) -> _Drawn:
        b = torch.randn(KV_HEADS * DIM, 1, generator=self._draw)
        heads = b.view(KV_HEADS, 1, DIM).expand(-1, HEADS // KV_HEADS, -1).reshape(-1)
        added = self._tensors[f"model.layers.{LAYER}.self_attn.o_proj.weight"] @ heads
        states = added / added.norm() * self._tensors["model.norm.weight"]
        head = self._tensors.get("lm_head.weight", self._tensors["model.embed_tokens.weight"])
        best = (head @ states).topk(2)
        return _Drawn(float(best.values[0] - best.values[1]), int(best.indices[0]), STRENGTH * b)
