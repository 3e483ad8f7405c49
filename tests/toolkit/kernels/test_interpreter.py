"""The interpreter of Triton, faster for the tests (tests/triton_interpreter.py), does what it did."""

from __future__ import annotations

import contextlib
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
