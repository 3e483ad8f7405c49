"""The names of a decoder's tensors in checkpoints, in older and newer layouts."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.kv_scales import is_kv_scale
from pegboard.toolkit.model.moe_spec import MoeSpec
from pegboard.toolkit.model.weights import StoredTensor, Target, checkpoint_files, read_header

_BODY, _HEAD = "model.", "lm_head."

_BODIES = ("model.language_model.", "language_model.model.")
_HEADS = ("language_model.lm_head.",)
"""Prefixes of a text tower beside the plain ones. Transformers has saved Qwen2-VL as `model.*` and, between versions
4.52 and 5, as `model.language_model.*`; Qwen3-VL is always the latter."""

_VISION = ("visual.", "model.visual.")


_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
"""Parts of names, and what Mixtral's checkpoints call them."""

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class Experts(enum.Enum):
    """How a checkpoint keeps a layer's experts."""

    TOGETHER = "together"
    """In `experts.gate_up_proj` [experts, 2 * intermediate, hidden] and `experts.down_proj` [experts, hidden,
    intermediate], as transformers 5 saves Qwen3-VL-MoE."""
    TURNED = "turned"
    """In the same two with their last dimensions exchanged, as Qwen3-VL-MoE is published."""
    SINGLE = "single"
    """Each in three matrices of its own, `experts.0.gate_proj.weight` and so on, as Qwen3-MoE and Mixtral are."""


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """How a checkpoint names the tensors of a decoder, which are called `model.*` and `lm_head.*` everywhere else and
    have their experts `TOGETHER`.
    """

    tied: bool = False
    tower: bool = False
    body: str = _BODY
    head: str = _HEAD
    experts: Experts = Experts.TOGETHER
    parts: Mapping[str, str] = field(default_factory=dict)
    """Parts of names that are other ones in the checkpoint."""

    @classmethod
    def of(cls, spec: DecoderSpec, directory: str | os.PathLike[str]) -> DecoderNames:
        """Look at the tensors that a model directory has. Raises ModelError where a file is missing or damaged."""
        if not spec.tower and spec.moe is None:
            return cls(tied=spec.tied_embeddings)
        stored = {name: one for file in checkpoint_files(directory) for name, one in read_header(file).items()}
        experts = Experts.TOGETHER if spec.moe is None else _experts(spec.moe, spec.hidden_size, stored)
        if not spec.tower:
            parts = _MIXTRAL if any(_MIXTRAL[".mlp."] in name for name in stored) else {}
            return cls(tied=spec.tied_embeddings, experts=experts, parts=parts)
        body, head = _first(_BODIES, stored, _BODY), _first(_HEADS, stored, _HEAD)
        return cls(spec.tied_embeddings, True, body, head, experts)

    def targets(self, targets: Mapping[str, Target]) -> dict[str, Target]:
        """Return buffers by the checkpoint's names, given by the decoder's: the same, and parts and views of them."""
        found: dict[str, Target] = {}
        for name, target in targets.items():
            if not name.endswith((_GATE_UP, _DOWN)) or self.experts is Experts.TOGETHER:
                found[self.stored(name)] = target
                continue
            assert isinstance(target, Tensor), "experts are not sliced"
            if self.experts is Experts.TURNED:
                found[self.stored(name)] = target.transpose(1, 2)
            else:
                found |= {self.stored(one): part for one, part in _singly(name, target).items()}
        return found

    def ignores(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is not the decoder's, or not needed: the rope's buffer in old ones,
        a copy of tied embeddings, scales of 8-bit keys and values, the vision tower.
        """
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == f"{self.head}weight"):
            return True
        if is_kv_scale(name):
            return True
        return self.tower and name.startswith(_VISION)

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that a tensor of the checkpoint belongs to; None: to none."""
        prefix = f"{self.body}layers."
        number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        return int(number) if number.isdecimal() else None

    def is_end(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is of the embeddings or the head."""
        return name.startswith((f"{self.body}embed_tokens.", self.head))

    def elsewhere(self, name: str, section: range, layers: int) -> bool:
        """Return whether a tensor of the checkpoint is for others, where this process computes a `section` of so many
        `layers`: the first section has the embeddings and the head, the last one the final norm.
        """
        if (layer := self.layer_of(name)) is not None:
            return layer < layers and layer not in section
        if name.startswith(f"{self.body}norm."):
            return section.stop < layers
        return section.start > 0 and self.is_end(name)

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of the decoder, experts of a layer together."""
        if name.startswith(_HEAD):
            return self.head + name.removeprefix(_HEAD)
        for part, stored in self.parts.items():
            name = name.replace(part, stored)
        return self.body + name.removeprefix(_BODY)


def _experts(moe: MoeSpec, hidden: int, stored: Mapping[str, StoredTensor]) -> Experts:
    """Look at the shapes: of the two kinds of matrices, one is not square in any model."""
    inter = moe.intermediate_size
    for name, tensor in stored.items():
        if ".experts.0." in name:
            return Experts.SINGLE
        turned = (hidden, 2 * inter) if name.endswith(_GATE_UP) else (inter, hidden) if name.endswith(_DOWN) else None
        if turned is not None and turned[0] != turned[1] and tensor.shape[1:] == turned:
            return Experts.TURNED
    return Experts.TOGETHER


def _singly(name: str, target: Tensor) -> dict[str, Tensor]:
    """Return each expert's part of a buffer for all of them."""
    base, kind = name.rsplit(".", 1)
    if kind == "down_proj":
        return {f"{base}.{index}.down_proj.weight": one for index, one in enumerate(target)}
    halves = [one.chunk(2) for one in target]
    gates = {f"{base}.{index}.gate_proj.weight": gate for index, (gate, _) in enumerate(halves)}
    return gates | {f"{base}.{index}.up_proj.weight": up for index, (_, up) in enumerate(halves)}


def _first(prefixes: Iterable[str], names: Iterable[str], default: str) -> str:
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), default)
