"""Loading heads: one network for the names and parts that checkpoints of different origin have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.spec_eagle.network import DraftNetwork, Parts
from pegboard.toolkit.model.packed import why_not_packed
from pegboard.toolkit.model.weights import (
    StoredTensor,
    Target,
    check_weights,
    checkpoint_files,
    load_weights,
    read_header,
)

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.model_runner import ModelEnds
    from pegboard.plugins.spec_eagle.config import DraftSpec

logger = logging.getLogger(__name__)

_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the model's own, in some checkpoints of `speculators`."""
_COMPARED = 4096
"""Rows of embeddings that are compared at once."""


def load_draft(
    directory: Path, spec: DraftSpec, layer: LayerSpec, target_hidden: int, ends: ModelEnds,
    *, dtype: torch.dtype, device: torch.device,
) -> tuple[DraftNetwork, Tensor | None]:  # fmt: skip
    """Return a head with its weights, and which ids its logits stand for, int64 [draft vocabulary] (None: all of the
    vocabulary, in order). Raises ModelError naming file, tensor and shapes where the checkpoint does not fit.
    """
    stored = _stored(directory)
    parts = _parts(directory, spec, {_plain(name): one for name, one in stored.items()}, target_hidden)

    def network_on(where: torch.device) -> DraftNetwork:
        return DraftNetwork(spec, parts, layer, target_hidden, dtype=dtype, device=where)

    def targets(network: DraftNetwork, where: torch.device) -> dict[str, Target]:
        buffers = network.targets()
        if any(_plain(name) == "d2t" for name in stored):
            buffers["d2t"] = torch.empty(spec.vocab_size or spec.decoder.vocab_size, dtype=torch.int64, device=where)
        if any(_plain(name) == "t2d" for name in stored):
            buffers["t2d"] = torch.empty(spec.decoder.vocab_size, dtype=torch.bool, device=where)
        names = {_plain(name): name for name in stored}
        return {names.get(name, name): buffer for name, buffer in buffers.items()}

    def ignored(name: str) -> bool:
        return _ignored(_plain(name), parts)

    meta = torch.device("meta")
    check_weights(directory, targets(network_on(meta), meta), ignore=ignored)
    network = network_on(device)
    buffers = targets(network, device)
    load_weights(directory, buffers, ignore=ignored)
    tables = {_plain(name): one for name, one in buffers.items() if isinstance(one, Tensor)}
    ids = _ids(directory, spec, tables.get("d2t"), tables.get("t2d"))
    if network.head is None:
        network.lent_logits = ends.logits
    if network.embedding is not None and _same_embeddings(network.embedding.weight, ends):
        network.embedding = None
    if why_not_packed(dtype, device) is None:
        network.pack()
    return network.eval(), ids


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors that the files have, by their names there."""
    if not any(directory.glob("*.safetensors")) and any(directory.glob("*.bin")):
        raise ModelError(
            f"{directory} has pickled weights only, and unpickling runs whatever code they hold. Where you trust them, "
            "save them as safetensors: safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), "
            "'model.safetensors')"
        )
    return {name: one for file in checkpoint_files(directory) for name, one in read_header(file).items()}


def _plain(name: str) -> str:
    """Return a tensor's name without what differs by origin."""
    plain = name.removeprefix("model.")
    return f"layers.0.{plain.removeprefix('midlayer.')}" if plain.startswith("midlayer.") else plain


def _ignored(name: str, parts: Parts) -> bool:
    """Return whether a tensor is of no use: the rope's buffer in old files, EAGLE-1's copy of the model's head."""
    unused = name in _UNUSED or name.endswith("rotary_emb.inv_freq")
    return unused or (name == "lm_head.weight" and not parts.head)


def _parts(directory: Path, spec: DraftSpec, stored: dict[str, StoredTensor], target_hidden: int) -> Parts:
    """Return what is in the files. Raises ModelError where the head cannot do without what is not."""
    own_head = spec.eagle3 and "lm_head.weight" in stored
    if spec.eagle3 and not own_head and spec.vocab_size not in (None, spec.decoder.vocab_size):
        raise ModelError(f"{directory} lacks lm_head.weight [{spec.vocab_size}, {spec.decoder.hidden_size}]")
    other_size = spec.decoder.hidden_size != target_hidden
    for name, there in (("embed_tokens.weight", "embed_tokens.weight" in stored), ("lm_head.weight", own_head)):
        if other_size and not there:
            raise ModelError(
                f"{directory} lacks {name}, which a head of another hidden size ({spec.decoder.hidden_size}) than the "
                f"model's ({target_hidden}) needs"
            )
    return Parts(
        fc_bias="fc.bias" in stored,
        qkv_bias="layers.0.self_attn.q_proj.bias" in stored,
        o_bias="layers.0.self_attn.o_proj.bias" in stored,
        mlp_bias="layers.0.mlp.gate_proj.bias" in stored,
        input_norm="layers.0.input_layernorm.weight" in stored,
        final_norm="norm.weight" in stored,
        embedding="embed_tokens.weight" in stored,
        head=own_head,
    )


def _ids(directory: Path, spec: DraftSpec, d2t: Tensor | None, t2d: Tensor | None) -> Tensor | None:
    """Return the ids of the draft vocabulary. d2t has what has to be added to a draft id."""
    vocab, count = spec.decoder.vocab_size, spec.vocab_size or spec.decoder.vocab_size
    if d2t is None:
        if count != vocab:
            raise ModelError(f"{directory} lacks d2t [{count}], which says what the draft vocabulary's ids stand for")
        return None
    ids = d2t + torch.arange(count, device=d2t.device)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ModelError(f"{directory}: d2t [{count}] leads to ids {low} to {high}, outside the vocabulary of {vocab}")
    if len(set(ids.tolist())) != count:
        raise ModelError(f"{directory}: d2t [{count}] leads to the same id from several places")
    if t2d is not None and (int(t2d.sum()) != count or not bool(t2d[ids].all())):
        raise ModelError(f"{directory}: t2d [{vocab}] and d2t [{count}] do not agree")
    return ids


def _same_embeddings(own: Tensor, ends: ModelEnds) -> bool:
    """Return whether a head's embeddings are the model's, so that they need not be there twice."""
    for start in range(0, own.shape[0], _COMPARED):
        part = own[start : start + _COMPARED]
        lent = ends.embed(torch.arange(start, start + len(part), device=own.device))
        if lent.shape != part.shape or not torch.equal(lent.to(part.dtype), part):
            return False
    return True
