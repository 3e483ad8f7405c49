"""What of a decoder is one rank's: its sizes, and its part of each tensor of the checkpoint."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.decoder_ranks import shared
from pegboard.toolkit.model.weights import Slice, Target

if TYPE_CHECKING:
    from pegboard.toolkit.model.decoder_spec import DecoderSpec
    from pegboard.toolkit.model.ranks import Cut, Ranks

_OUT = ("o_proj", "down_proj")
"""Modules whose columns are cut, so that ranks have partial sums: their bias is added by rank 0 alone."""

LOST = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_double)
"""What the library asks while it waits for other ranks."""


def objection(spec: DecoderSpec, ranks: Ranks, *, coded: bool) -> str | None:
    """Return None where so many ranks can compute a decoder, else why not."""
    if ranks.size == 1:
        return None
    if not ranks.share_memory:
        return "its ranks add up in memory that all of them map; set parallel.communicator.use to shm"
    if coded:
        return f"it does not cut quantised weights for ranks, and parallel.tensor is {ranks.size}"
    if spec.moe is not None:
        return f"it does not cut experts for ranks, and parallel.tensor is {ranks.size}"
    try:
        shared(spec, ranks)
    except ModelError as error:
        return str(error)
    return None


class Share:
    """The share of one of the `ranks`; all of it where there is one."""

    def __init__(self, spec: DecoderSpec, ranks: Ranks) -> None:
        self._alone = ranks.size == 1
        self._first = ranks.index == 0
        self._vocabulary = ranks.vocabulary(spec.vocab_size)
        heads, kv_heads = (ranks.cut(size, spec.head_dim) for size in (spec.q_size, spec.kv_size))
        inner = ranks.cut(spec.intermediate_size)
        self._cuts = {
            "q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads,
            "gate_proj": inner, "up_proj": inner, "down_proj": inner,
            "embed_tokens": self._vocabulary, "lm_head": self._vocabulary,
        }  # fmt: skip
        rows = spec.vocab_size if self._alone else ranks.vocabulary_rows(spec.vocab_size)
        self.spec = replace(shared(spec, ranks), vocab_size=rows)
        """The decoder with the sizes of this rank's share. Its vocabulary is padded."""
        self.first_id = self._vocabulary.start

    def has(self, name: str) -> bool:
        """Return whether this rank needs anything of a tensor."""
        module, kind = name.split(".")[-2:]
        return self._first or kind != "bias" or module not in _OUT

    def memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Target]:
        """Return memory for this rank's part of a tensor of that shape, and how it is filled. What is padding is 0."""
        module, kind = name.split(".")[-2:]
        cut, dim = self._cuts.get(module), int(module in _OUT)
        if self._alone or cut is None or (dim and kind == "bias"):
            whole = torch.empty(shape, dtype=dtype)
            return whole, whole
        if cut is self._vocabulary:
            padded = torch.zeros(self.spec.vocab_size, *shape[1:], dtype=dtype)
            return padded, Slice(padded[: cut.length], 0, cut.start, shape)
        part = torch.empty(_replaced(shape, dim, cut), dtype=dtype)
        return part, Slice(part, dim, cut.start, shape)


def _replaced(shape: tuple[int, ...], dim: int, cut: Cut) -> tuple[int, ...]:
    return (*shape[:dim], cut.length, *shape[dim + 1 :])


class Waiting:
    """Asks `ranks` whether there is use in waiting for the others; `error` says why not."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.error: Exception | None = None
        self.lost = LOST(self._lost)

    def _lost(self, waited: float) -> int:
        try:
            self._ranks.together.check_others(waited)
        except Exception as error:
            self.error = error
            return 1
        return 0
