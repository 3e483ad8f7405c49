"""One rank's share of a decoder: its sizes, and its part of each tensor of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.cpu_native.library import LOST
from pegboard.toolkit.model.decoder_ranks import shared
from pegboard.toolkit.model.weights import Slice, Target

if TYPE_CHECKING:
    from pegboard.toolkit.model.decoder_spec import DecoderSpec
    from pegboard.toolkit.model.ranks import Cut, Ranks

_OUT = ("o_proj", "down_proj")
"""Modules whose columns are cut, so that ranks have partial sums: their bias is added by rank 0 alone."""


def objection(spec: DecoderSpec, ranks: Ranks, *, coded: bool) -> str | None:
    """Return None where so many ranks can compute a decoder, else why not."""
    if ranks.size == 1:
        return None
    if not ranks.share_memory:
        text = "its ranks add up in memory that all of them map, which takes a communicator with the capability "
        return text + "'shared_memory': set parallel.communicator.use to shm"
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
        own = shared(spec, ranks)
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
        self.spec = replace(own, vocab_size=ranks.vocabulary_rows(spec.vocab_size))
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
    """Tells the library whether another one of the `ranks` is lost; `error` then says why."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.error: BaseException | None = None
        self.lost = LOST(self._lost)

    def _lost(self, waited: float) -> int:
        try:
            self._ranks.together.check_others(waited)
        except BaseException as error:  # Ctrl-C, too: nothing above this would hear of it
            self.error = error
            return 1
        return 0
