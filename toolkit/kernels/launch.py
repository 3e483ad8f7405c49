"""Launching of kernels, in one place, so that launches can be counted, recorded and replayed."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Argument = torch.Tensor | float | int | bool
    Constant = int | bool | float | str

Grid = tuple[int, ...]


class Kernel(Protocol):
    """A function that Triton compiles. Indexed with a grid it gives what runs it."""

    def __getitem__(self, grid: Grid, /) -> Callable[..., object]: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with all that it is given: tensors and scalars in their order, and what it is compiled for."""

    kernel: Kernel
    grid: Grid
    arguments: tuple[Argument, ...]
    constants: dict[str, Constant]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)


Observer = Callable[[Launch], bool]
"""Learns of a launch before it happens. Returns whether the kernel is to run."""

_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("launch_observer", default=None)


def launch(kernel: Kernel, grid: Grid, *arguments: Argument, **constants: Constant) -> None:
    """Run a kernel over a grid, unless who observes says no. A grid without a program launches nothing."""
    if 0 in grid:
        return
    observer = _observer.get()
    if observer is None or observer(Launch(kernel, grid, arguments, constants)):
        kernel[grid](*arguments, **constants)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell `observer` of all launches of this thread in the block."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
