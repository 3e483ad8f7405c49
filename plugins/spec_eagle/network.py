"""The network of an EAGLE head: what mixes the model's states, one decoder layer, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pegboard.toolkit.model.attending import attended
from pegboard.toolkit.model.layers import Embedding, FusedLinear, Linears, RMSNorm
from pegboard.toolkit.model.mlp import GatedMLP
from pegboard.toolkit.model.rope import RotaryEmbedding

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.spec_eagle.config import DraftSpec
    from pegboard.toolkit.model.weights import Target


@dataclass(frozen=True, slots=True)
class Parts:
    """What a checkpoint has beyond what every head has: biases, norms that EAGLE-1's own checkpoints lack, tables of
    its own for embeddings and logits.
    """

    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    input_norm: bool = True
    final_norm: bool = True
    embedding: bool = False
    head: bool = False


class DraftLayer(nn.Module):
    """A decoder layer over an embedding and a state. That of EAGLE-3 attends from both side by side and adds to the
    state; that of EAGLE-1 has one input, already mixed.
    """

    def __init__(
        self, spec: DraftSpec, parts: Parts, layer: LayerSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        decoder = spec.decoder
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, eps, dtype=dtype, device=device)

        self.layer = layer
        self.norm_before_residual = spec.norm_before_residual
        self.input_norm = norm(hidden) if parts.input_norm or spec.eagle3 else None
        self.hidden_norm = norm(hidden) if spec.eagle3 else None
        sizes = (decoder.q_size, decoder.kv_size, decoder.kv_size)
        width = hidden * 2 if spec.eagle3 else hidden
        self.qkv = FusedLinear(width, sizes, bias=parts.qkv_bias, dtype=dtype, device=device)
        self.o = FusedLinear(decoder.q_size, (hidden,), bias=parts.o_bias, dtype=dtype, device=device)
        self.q_norm = norm(decoder.head_dim) if decoder.qk_norm else None
        self.k_norm = norm(decoder.head_dim) if decoder.qk_norm else None
        self.post_norm = norm(hidden)
        linears = Linears(dtype, device)
        self.mlp = GatedMLP("mlp", hidden, decoder.intermediate_size, decoder.hidden_act, linears, bias=parts.mlp_bias)

    def forward(self, embeds: Tensor | None, state: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """Return [n, hidden] of embeddings and states [n, hidden]; `embeds` is None for EAGLE-1."""
        normed = state
        if self.hidden_norm is not None and self.input_norm is not None and embeds is not None:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
            normed = torch.cat((self.input_norm(embeds), normed), dim=-1)
        else:
            residual = state
            normed = state if self.input_norm is None else self.input_norm(state)
        x = residual + self._attention(normed, cos, sin, batch)
        out: Tensor = x + self.mlp(self.post_norm(x))
        return out

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        layer = self.layer
        heads = self.qkv(x).view(x.shape[0], layer.num_heads + 2 * layer.num_kv_heads, layer.qk_head_dim)
        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        out: Tensor = self.o(attended(heads, norms, (cos, sin), layer, batch).reshape(x.shape[0], -1))
        return out

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for a layer called `name`."""
        at = f"{name}.self_attn"
        found = {
            **self.qkv.targets((f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")),
            **self.o.targets((f"{at}.o_proj",)),
            **self.post_norm.targets(f"{name}.post_attention_layernorm"),
            **self.mlp.targets(f"{name}.mlp"),
        }
        norms = {"input_layernorm": self.input_norm, "hidden_norm": self.hidden_norm}
        norms |= {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        for part, norm in norms.items():
            if norm is not None:
                found |= norm.targets(f"{name}.{part}")
        return found


class DraftNetwork(nn.Module):
    """A head with its weights in `dtype` on `device`, uninitialised until `targets()` are filled."""

    def __init__(
        self, spec: DraftSpec, parts: Parts, layer: LayerSpec, target_hidden: int,
        *, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        hidden, eps, count = spec.decoder.hidden_size, spec.decoder.rms_norm_eps, len(spec.taps)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, eps, dtype=dtype, device=device)

        reads = count * target_hidden if spec.eagle3 else 2 * hidden
        self.fc = FusedLinear(reads, (hidden,), bias=parts.fc_bias, dtype=dtype, device=device)
        self.joint_norm = norm(reads) if spec.norm_before_fc else None
        self.single_norms = nn.ModuleList(norm(target_hidden) for _ in range(count if spec.fc_norm else 0))
        self.layer = DraftLayer(spec, parts, layer, dtype=dtype, device=device)
        self.norm = norm(hidden) if parts.final_norm or spec.eagle3 else None
        self.rope = RotaryEmbedding(spec.decoder.rope, device)
        vocab = spec.decoder.vocab_size
        self.embedding = Embedding(vocab, hidden, dtype=dtype, device=device) if parts.embedding else None
        self.head = Embedding(spec.vocab_size or vocab, hidden, dtype=dtype, device=device) if parts.head else None
        self.lent_logits: Callable[[Tensor], Tensor] | None = None
        """The model's head, for a network without one."""

    def mixed(self, taps: Tensor) -> Tensor:
        """Return states [n, hidden] as the layer reads them, of the model's own [n, taps x hidden]."""
        if not self.spec.eagle3:
            return taps
        if self.joint_norm is not None:
            taps = self.joint_norm(taps)
        if self.single_norms:
            parts = taps.chunk(len(self.single_norms), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.single_norms, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(taps)
        return out

    def forward(self, embeds: Tensor, states: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Return outputs [n, hidden] of tokens, given their embeddings and the states before them [n, hidden]; KV goes
        to the batch's slots. `positions` int64 [n] are those of the states.
        """
        cos, sin = self.rope(positions, states.dtype)
        if self.spec.eagle3:
            out: Tensor = self.layer(embeds, states, cos, sin, batch)
        else:
            out = self.layer(None, self.fc(torch.cat((embeds, states), dim=-1)), cos, sin, batch)
        return out

    def states(self, outputs: Tensor) -> Tensor:
        """Return what the next tokens' layer reads in place of the model's states."""
        if self.spec.norm_output and self.norm is not None:
            normed: Tensor = self.norm(outputs)
            return normed
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Return float32 [n, draft vocabulary]."""
        normed = outputs if self.norm is None else self.norm(outputs)
        if self.head is not None:
            return self.head.logits(normed)
        assert self.lent_logits is not None
        return self.lent_logits(normed)

    def pack(self) -> None:
        """Replace the loaded matrices by packed ones."""
        for linear in (self.fc, self.layer.qkv, self.layer.o):
            linear.pack()
        self.layer.mlp.pack()
        if self.head is not None:
            self.head.pack(looked_up=False)

    def targets(self) -> dict[str, Target]:
        """Checkpoint name -> buffer, for all weights, in the names of `speculators`."""
        found = {**self.fc.targets(("fc",)), **self.layer.targets("layers.0")}
        if self.norm is not None:
            found |= self.norm.targets("norm")
        if self.joint_norm is not None:
            found |= self.joint_norm.targets("input_norm")
        for index, norm in enumerate(self.single_norms):
            assert isinstance(norm, RMSNorm)
            found |= norm.targets(f"fc_norm.{index}")
        if self.embedding is not None:
            found["embed_tokens.weight"] = self.embedding.weight
        if self.head is not None:
            found["lm_head.weight"] = self.head.weight
        return found
