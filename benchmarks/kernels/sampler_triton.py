"""The sampler's kernel, for the vocabularies of Llama 2, Llama 3 and Qwen, and for one that 16 does not divide.

The kernel has a loop over the vocabulary, and no size in its code: the first three compile to the same.
"""

from __future__ import annotations

import torch

from benchmarks.kernels import Case, Target
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.sampler_triton.options import TritonSamplerOptions
from pegboard.plugins.sampler_triton.sampler import TritonSampler

ROWS = 64


def _sample(target: Target, vocab: int) -> None:
    floats, ints = (target.empty(ROWS, dtype=dtype) for dtype in (torch.float32, torch.int64))
    batch = SamplingBatch(floats, floats, ints, floats, ints, ints, all_greedy=False)
    sampler = TritonSampler(TritonSamplerOptions(rows=1), SamplerContext(vocab, floats.device))
    sampler.sample(target.empty(ROWS, vocab, dtype=torch.float32), batch)


CASES = tuple(
    Case(f"sampler {vocab}", lambda target, vocab=vocab: _sample(target, vocab))
    for vocab in (32_000, 128_256, 151_936, 50_257)
)
