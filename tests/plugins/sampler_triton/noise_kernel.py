"""The noise of the sampler's kernel by itself."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from pegboard.plugins.sampler_triton.kernels import gumbel, halves


@triton.jit
def noise_kernel(seeds, steps, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,): write the noise of the first COUNT token ids."""
    row = tl.program_id(0) + tl.arange(0, 1)
    low, high = halves(tl.load(seeds + row), tl.load(steps + row))
    for at in range(0, COUNT, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        tl.store(out + row * COUNT + ids, gumbel(low, high, ids))
