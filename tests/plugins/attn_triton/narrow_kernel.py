"""What queries beside keys of 8 bits become, by itself."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from pegboard.plugins.attn_triton.widening import narrowed


@triton.jit
def narrow_kernel(queries, halves, factors, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Write queries bfloat16 [ROWS, DIM] in float16, and float32 [ROWS, 1] that they are to be multiplied by."""
    rows = tl.arange(0, ROWS)[:, None]
    at = rows * DIM + tl.arange(0, DIM)[None, :]
    half, factor = narrowed(tl.load(queries + at))
    tl.store(halves + at, half)
    tl.store(factors + rows, factor)
