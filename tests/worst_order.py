"""A plugin for pytest that makes sums in float32 as wrong as some machine may make them: ``-p tests.worst_order``.

Each sum of torch gets the error of adding its terms one after the other, the worst order, as docs/style.md has it. The
error depends on the sum alone, so equal sums stay equal. A tolerance that holds here does not depend on the order of
this machine. NumPy, fused attention and native code stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = 2.0**-24


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The error of a matrix product: terms of either sign, whose sums grow as the root of their number."""
    a, b = a.double(), b.double()
    terms = (a.square() @ b.square() * a.shape[-1]).sqrt()
    return torch.minimum(terms, a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True)) / math.sqrt(6)


def total(x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> torch.Tensor:
    """The error of a sum: of terms of either sign or of one, the larger. Sums of whole numbers are exact."""
    dims, x = [*dim] if dim else [*range(x.ndim)], x.double()
    count = math.prod(x.shape[one] for one in dims)
    mixed = x.square().sum(dims, keepdim).sqrt() * math.sqrt(count / 6)
    return torch.maximum(mixed, x.sum(dims, keepdim).abs() * math.sqrt(count) / 3) * (not whole(x))


def whole(x: torch.Tensor) -> bool:
    return bool((x == x.round()).all())


def mean(x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> torch.Tensor:
    return total(x, dim, keepdim) / math.prod(x.shape[one] for one in (dim or range(x.ndim)))


def shares(x: torch.Tensor, dim: int, _: bool) -> torch.Tensor:
    return x.double().softmax(dim) * math.sqrt(x.shape[dim]) / 3


def logarithms(x: torch.Tensor, dim: int, _: bool) -> torch.Tensor:
    return torch.full_like(x, math.sqrt(x.shape[dim]) / 3, dtype=torch.float64)


def running(x: torch.Tensor, dim: int, **_: Any) -> torch.Tensor:
    return x.double().abs().cumsum(dim) * math.sqrt(x.shape[dim]) / 3 * (not whole(x))


ERRORS: Mapping[str, Callable[..., torch.Tensor]] = {
    "mm": product,
    "bmm": product,
    "addmm": lambda _, a, b, **more: product(a, b),
    "baddbmm": lambda _, a, b, **more: product(a, b),
    "sum": total,
    "mean": mean,
    "_softmax": shares,
    "_log_softmax": logarithms,
    "cumsum": running,
}
"""Standard deviations by operation, float64, in units of ROUNDING; they take the operation's arguments."""


def normal(values: torch.Tensor) -> torch.Tensor:
    """Numbers with a standard deviation of 1 that depend on the bits of float32 `values` alone."""
    mixed = values.contiguous().view(torch.int32).long() * 0x9E3779B97F4A7C1
    uniform = ((mixed >> 24 & 0xFFFFFF).double() + 0.5) / 2**24
    return torch.special.ndtri(uniform)


class WorstOrder(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        error = ERRORS.get(func.overloadpacket.__name__)
        if error is None or not isinstance(result, torch.Tensor) or result.dtype != torch.float32:
            return result
        if result.device.type == "cpu" and result.numel() and args[0].dtype == torch.float32:
            about = {name: value for name, value in kwargs.items() if name != "out"}
            off = normal(result) * error(*args, **about) * ROUNDING
            result += torch.where(off.isfinite() & result.isfinite(), off, 0.0).float()
        return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with WorstOrder():
        return (yield)
