"""Under which names a checkpoint keeps a decoder's tensors: the one place that knows of older and newer layouts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pegboard.core.toolkit.model.decoder_spec import DecoderSpec
from pegboard.core.toolkit.model.weights import checkpoint_files, read_header

_BODY, _HEAD = "model.", "lm_head."

_BODIES = ("model.language_model.", "language_model.model.")
_HEADS = ("language_model.lm_head.",)
"""Prefixes of a text tower beside the plain ones. Transformers has saved Qwen2-VL as `model.*` and, between versions
4.52 and 5, as `model.language_model.*`; Qwen3-VL is always the latter."""

_VISION = ("visual.", "model.visual.")


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """How a checkpoint names the tensors of a decoder, which are called `model.*` and `lm_head.*` everywhere else."""

    tied: bool = False
    tower: bool = False
    body: str = _BODY
    head: str = _HEAD

    @classmethod
    def of(cls, spec: DecoderSpec, directory: str | os.PathLike[str]) -> DecoderNames:
        """Look at the tensors that a model directory has. Raises ModelError where a file is missing or damaged."""
        if not spec.tower:
            return cls(tied=spec.tied_embeddings)
        names = [name for file in checkpoint_files(directory) for name in read_header(file)]
        return cls(spec.tied_embeddings, True, _first(_BODIES, names, _BODY), _first(_HEADS, names, _HEAD))

    def targets(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return buffers by the checkpoint's names, given by the decoder's."""
        return {self._stored(name): target for name, target in targets.items()}

    def ignores(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is not the decoder's, or not needed: the rope's buffer in old ones,
        a copy of tied embeddings, the vision tower.
        """
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == f"{self.head}weight"):
            return True
        return self.tower and name.startswith(_VISION)

    def _stored(self, name: str) -> str:
        if name.startswith(_HEAD):
            return self.head + name.removeprefix(_HEAD)
        return self.body + name.removeprefix(_BODY)


def _first(prefixes: Iterable[str], names: list[str], default: str) -> str:
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), default)
