"""The network: pre-norm decoder layers over the pipeline's attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.model_family import Network
from pegboard.toolkit.kernels import usable
from pegboard.toolkit.model.attending import attended
from pegboard.toolkit.model.decoder_ranks import shared
from pegboard.toolkit.model.layers import Embedding, Linears, RMSNorm
from pegboard.toolkit.model.mlp import GatedMLP
from pegboard.toolkit.model.moe import MixtureOfExperts
from pegboard.toolkit.model.ranks import nothing
from pegboard.toolkit.model.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Generator

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.weights import WeightStore
    from pegboard.toolkit.model.decoder_spec import DecoderSpec
    from pegboard.toolkit.model.weights import Target


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on packed tokens [tokens, hidden].

    A norm belongs to the addition before it, so that one kernel does both: the first norm is the network's to call, and
    so is the second addition, together with the next layer's norm.
    """

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, linears: Linears) -> None:
        super().__init__()
        self.layer = layer
        hidden, eps, dtype, device = spec.hidden_size, spec.rms_norm_eps, linears.dtype, linears.device
        name = layer_name(layer.layer_id)
        qkv = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        self.input_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        parts = {f"{name}.self_attn.{part}": size for part, size in qkv.items()}
        self.qkv = linears(hidden, parts, bias=spec.qkv_bias, split="out", unit=spec.head_dim)
        out = {f"{name}.self_attn.o_proj": hidden}
        self.o = linears(spec.q_size, out, bias=spec.o_bias, split="in", unit=spec.head_dim)
        self.q_norm = RMSNorm(spec.head_dim, eps, dtype=dtype, device=device) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, eps, dtype=dtype, device=device) if spec.qk_norm else None
        self.post_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = _mlp(spec, layer.layer_id, linears)

    def forward(
        self, normed: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Return what is to be added to the residual next, and the residual, of the normed input and the input."""
        heads = self.qkv(normed, batch.additions).view(normed.shape[0], -1, self.layer.qk_head_dim)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        out = attended(heads, norms, rotation, self.layer, batch)
        projected = self.o(out.reshape(normed.shape[0], -1), batch.additions)
        normed, residual = self.post_norm.add(projected, residual)
        return self.mlp(normed, batch.additions), residual

    def pack(self) -> None:
        """See `DenseNetwork.pack`."""
        self.qkv.pack()
        self.o.pack()
        self.mlp.pack()

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for a layer called `name`."""
        attention = f"{name}.self_attn"
        found: dict[str, Target] = {
            **self.input_norm.targets(f"{name}.input_layernorm"),
            **self.qkv.targets((f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")),
            **self.o.targets((f"{attention}.o_proj",)),
            **self.post_norm.targets(f"{name}.post_attention_layernorm"),
            **self.mlp.targets(f"{name}.mlp"),
        }
        if self.q_norm is not None and self.k_norm is not None:
            found |= self.q_norm.targets(f"{attention}.q_norm") | self.k_norm.targets(f"{attention}.k_norm")
        return found


def layer_name(layer_id: int) -> str:
    """Return what transformers calls a decoder layer."""
    return f"model.layers.{layer_id}"


def _mlp(spec: DecoderSpec, layer: int, linears: Linears) -> GatedMLP | MixtureOfExperts:
    name, hidden, act = f"{layer_name(layer)}.mlp", spec.hidden_size, spec.hidden_act
    if spec.moe is not None and spec.moe.layers[layer]:
        return MixtureOfExperts(name, spec.moe, hidden, act, linears)
    return GatedMLP(name, hidden, spec.intermediate_size, act, linears, bias=spec.mlp_bias)


class DenseNetwork(nn.Module, Network):
    """A dense decoder, uninitialised until `targets()` are filled and `linears` have read theirs. Where it is divided
    into sections, only the first one has embeddings and a head, and only the last one a final norm.
    """

    def __init__(self, spec: DecoderSpec, linears: Linears) -> None:
        super().__init__()
        self.spec = spec
        dtype, device = linears.dtype, linears.device
        self.dtype = dtype
        self.ranks = linears.ranks
        self.sections = self.ranks.sections
        self.embedding = self._table(dtype, device) if self.sections.first else None
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, linears) for layer in shared(spec, self.ranks).layer_specs()
        )
        self.store: WeightStore | str = "the family has not said how"
        """Its weights, to be replaced, or why they cannot be."""
        last = self.sections.last
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype, device=device) if last else None
        self.rope = RotaryEmbedding(spec.rope, device)
        own_head = self.sections.first and not spec.tied_embeddings
        self.head = self._table(dtype, device) if own_head else self.embedding

    def _table(self, dtype: torch.dtype, device: torch.device) -> Embedding:
        spec = self.spec
        return Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device, ranks=self.ranks)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm; see `Network.forward`, and `Sections.hand_on`."""
        residual, rotation = self._enter(batch)
        if residual.shape[0] == 0:
            return residual
        normed = self._norm(0)(residual)
        for index, layer in enumerate(self.layers):
            _show(batch, index, residual)
            x, residual = layer(normed, residual, rotation, batch)
            normed, residual = self._leave(index, x, residual, batch)
        return self.sections.hand_on(self._shown(normed, residual, batch), batch)

    @torch.inference_mode()
    def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, Tensor]:
        """`forward` with a pause after every layer."""
        residual, rotation = self._enter(batch)
        normed = self._norm(0)(residual)
        for index, layer in enumerate(self.layers):
            _show(batch, index, residual)
            x, residual = layer(normed, residual, rotation, batch)
            normed, residual = self._leave(index, x, residual, batch)
            yield
        return self.sections.hand_on(self._shown(normed, residual, batch), batch)

    def _enter(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Embeddings [tokens, hidden], or what the section before sends, and the rotations of the batch's positions."""
        if self.embedding is None:
            x = batch.positions.new_empty(batch.num_tokens, self.spec.hidden_size, dtype=self.dtype)
            x = self.sections.receive(x) if batch.num_tokens else x
            return x, self.rope(batch.positions, x.dtype)
        self.ranks.known(batch)
        x = self.embedding(batch.input_ids)
        if batch.overlay is not None:
            x = x.index_copy_(0, batch.overlay.rows, batch.overlay.states)
        return x, self.rope(batch.positions, x.dtype)

    def _norm(self, layer: int) -> RMSNorm:
        """Return the norm of a layer's input."""
        found = self.layers[layer]
        assert isinstance(found, DecoderLayer)
        return found.input_norm

    def _leave(self, layer: int, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Add x to the residual, and then the deep states that the batch's overlay has for the layer. Return the next
        layer's normed input, and the residual. After the last layer the norm is the final one; a section that has none
        hands on the residual itself.
        """
        norm = self.norm if layer + 1 == len(self.layers) else self._norm(layer + 1)
        if norm is not None and (batch.overlay is None or layer >= len(batch.overlay.deep)):
            return norm.add(x, residual)
        total = residual + x
        if batch.overlay is not None and layer < len(batch.overlay.deep):
            total = total.index_add_(0, batch.overlay.rows, batch.overlay.deep[layer])
        return (total if norm is None else norm(total)), total

    def _shown(self, normed: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Return what comes after the final norm."""
        _show(batch, len(self.layers), residual)
        _show(batch, len(self.layers) + 1, normed)
        return normed

    def capture_objection(self) -> str | None:
        """Object to experts for which the host waits."""
        reasons = (one.why_it_waits() for one in self.modules() if isinstance(one, MixtureOfExperts))
        return next((reason for reason in reasons if reason is not None), None)

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [n, hidden] of ids int64 [n]; see `Network.embed`."""
        if self.embedding is None:
            raise Unsupported("a section without embeddings", "taps")
        out: Tensor = self.embedding(ids)
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [n, vocab]; see `Network.logits`. Without a meaning in a section that has no head."""
        if self.head is None:
            return nothing(hidden.shape[0], self.spec.vocab_size, hidden)
        return self.head.logits(hidden)

    def weights(self) -> WeightStore:
        """Return the weights; see `Network.weights`."""
        if isinstance(self.store, str):
            raise Unsupported("the model family 'dense'", "updates", self.store)
        return self.store

    def pack(self) -> None:
        """Replace the loaded matrices by packed ones, one after another, so that one is held twice at most. Tied
        embeddings stay beside their packed copy.
        """
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.pack()
        if self.head is not None:
            self.head.pack(looked_up=self.spec.tied_embeddings)

    def targets(self) -> dict[str, Target]:
        """Checkpoint name -> buffer, for all weights that are not packed, under the names that transformers gives
        them.
        """
        found: dict[str, Target] = {}
        if self.embedding is not None:
            found["model.embed_tokens.weight"] = self.embedding.target()
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            found |= layer.targets(layer_name(layer.layer.layer_id))
        if self.norm is not None:
            found |= self.norm.targets("model.norm")
        if not (self.head is None or self.spec.tied_embeddings or self.head.packed):
            found["lm_head.weight"] = self.head.target()
        return found


def _show(batch: ForwardBatch, place: int, x: Tensor) -> None:
    """Show the states at a place to those that read them. They get a copy where kernels add to them in place."""
    if batch.taps is not None and place in batch.taps.places:
        batch.taps.note(place, x.clone() if usable(x.device) else x)
