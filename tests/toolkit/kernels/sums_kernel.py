"""A kernel that calls a function."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def sums_kernel(source, target, WRONG: tl.constexpr):
    x = tl.load(source + tl.arange(0, 4))
    tl.static_assert(not WRONG, "as it was asked to")
    tl.store(target, tl.sum(plus_one(plus_one(x)), 0))
