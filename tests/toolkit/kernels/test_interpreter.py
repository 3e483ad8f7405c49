"""The interpreter of Triton, faster for the tests (tests/triton_interpreter.py), does what it did."""

from __future__ import annotations

import contextlib
import importlib
from types import FunctionType
from typing import Any

import pytest

from tests.triton_interpreter import patch_once

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")


@pytest.fixture
def sums_kernel(interpreted_triton: None) -> Any:
    from tests.toolkit.kernels import sums_kernel  # interpreted, if it is imported here

    kernel: Any = sums_kernel.sums_kernel
    kernel[1,](torch.zeros(4), torch.zeros(1), WRONG=False)  # the first launch of all leaves something
    return kernel


def language() -> list[object]:
    tl = triton.language
    return [dict(vars(place)) for place in (tl, tl.tensor, tl.math)]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_language_is_as_before(sums_kernel: Any, wrong: bool) -> None:
    """Whether the kernel ends or fails."""
    before, x = language(), torch.arange(4, dtype=torch.float32)
    found = torch.zeros(1)
    with pytest.raises(Exception, match="as it was asked to") if wrong else contextlib.nullcontext():
        sums_kernel[1,](x, found, WRONG=wrong)
    assert language() == before
    assert found.item() == (0 if wrong else 14)


def test_integers_wrap_around(sums_kernel: Any) -> None:
    """As they do without the option `debug`."""
    x, found = torch.full((4,), 2**31 - 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    sums_kernel[1,](x, found, WRONG=False)
    assert found.item() == 4 * (-(2**31) + 1) + 2**33


def test_types_know_their_shapes() -> None:
    core = triton.language.core
    for made in (core.block_type(core.int8, [4, 1]), core.block_type(core.int8, [core.constexpr(4), 1])):
        assert made == core.block_type(core.int8, [4, 1])
        assert (made.name, made.numel, made.nbytes, list(made.shape)) == ("<['4', '1'], int8>", 4, 4, [4, 1])
        value = core.tensor("handle", made.with_element_ty(core.float16))
        assert (value.handle, value.dtype, value.numel.value) == ("handle", core.float16, 4)
        assert [size.value for size in value.shape] == [4, 1]
    assert core.block_type(core.int8, [4]) != core.block_type(core.int8, [4, 1])
    alone = core.tensor("handle", core.int1)
    assert (len(alone.shape), alone.numel.value, alone.dtype) == (0, 1, core.int1)
    for shape, message in (([3], "power of 2"), ([], "0d"), ([2**21], "exceeds")):
        with pytest.raises((TypeError, ValueError), match=message):
            core.block_type(core.int8, shape)


def test_operands_are_converted(interpreted_triton: None) -> None:
    core, semantic = triton.language.core, importlib.import_module("triton.runtime.interpreter").interpreter_semantic
    wide, narrow = (semantic.full(shape, 1.5, core.float16) for shape in ([4, 2], [4, 1]))
    assert [list(one.type.shape) for one in semantic.broadcast_impl_value(wide, narrow)] == [[4, 2]] * 2
    assert all(one is wide for one in semantic.broadcast_impl_value(wide, wide))
    assert semantic.cast(wide, core.float16) is wide
    assert semantic.cast(wide, core.int32).handle.data.tolist() == [[1, 1]] * 4
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.broadcast_impl_value(wide, semantic.full([2, 4], 1.5, core.float16))
    pairs = {(core.bfloat16, core.float32): core.float32, (core.int8, core.int32): core.int32}
    for (first, second), both in pairs.items():
        assert semantic.computation_type_impl(first, False, second, False, False) == both
    with pytest.raises(TypeError, match="different signedness"):
        semantic.computation_type_impl(core.int32, False, core.uint32, False, True)


class Replaced:
    """What one call of Triton's function replaced."""

    def __init__(self) -> None:
        self.restored = 0

    def restore(self) -> None:
        self.restored += 1


def of_module() -> tuple[FunctionType, FunctionType]:
    """Return two functions with a module of their own."""
    place: dict[str, Any] = {}
    return FunctionType(of_module.__code__, place), FunctionType(of_module.__code__, place)


def test_each_launch_replaces_once_for_each_module() -> None:
    calls: list[Replaced] = []

    def patch(function: FunctionType) -> Replaced:
        calls.append(Replaced())
        return calls[-1]

    patch_if_new = patch_once(patch)
    (kernel, beside), (elsewhere, _) = of_module(), of_module()
    for launch in (0, 2):
        scope = patch_if_new(kernel)
        for function in (beside, elsewhere, kernel, elsewhere):
            patch_if_new(function)
        assert len(calls) == launch + 2
        scope.restore()
        assert [one.restored for one in calls[launch:]] == [1, 0]  # its own, which has what was there before
