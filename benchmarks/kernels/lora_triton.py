"""LoRA adapters: the sites of Llama 3 8B's layers, ranks of 16 and 64, one adapter and many."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kernels import Case, Target
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterContext
from pegboard.plugins.lora_triton.backend import TritonAdapters
from pegboard.toolkit.model.linear import Part, Site

SITES = {
    "qkv": Site(0, (Part("q", 4096), Part("k", 1024), Part("v", 1024)), 4096),
    "o": Site(1, (Part("o", 4096),), 4096),
    "gate and up": Site(2, (Part("gate", 14336), Part("up", 14336)), 4096),
    "down": Site(3, (Part("down", 4096),), 14336),
}


def _add(target: Target, site: Site, max_rank: int, dtype: torch.dtype, slots: int, tokens: int) -> None:
    ctx = AdapterContext((site,), dtype, torch.device("meta"), 8, max_rank)
    backend = TritonAdapters(NoOptions(), ctx)

    def put(array: NDArray[np.generic]) -> torch.Tensor:
        return target.empty(*array.shape, dtype=torch.int32)

    lens = np.full(slots, tokens, np.int64)
    additions = backend.begin(np.arange(1, slots + 1), lens, put)
    assert additions is not None
    total = slots * tokens
    out = target.empty(total, site.rows, dtype=dtype)
    additions.add(site.number, target.empty(total, site.cols, dtype=dtype), out)


CASES = tuple(
    Case(
        f"adapters {name}, rank {rank}, {slots} x {tokens} tokens {str(dtype).removeprefix('torch.')}",
        functools.partial(_add, site=site, max_rank=rank, dtype=dtype, slots=slots, tokens=tokens),
    )
    for name, site in SITES.items()
    for rank in (16, 64)
    for slots, tokens, dtype in ((8, 1, torch.bfloat16), (8, 1, torch.float16), (1, 512, torch.bfloat16))
)  # fmt: skip
