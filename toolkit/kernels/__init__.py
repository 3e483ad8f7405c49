"""Kernels that any plugin may use, where they may be used, and the one way in which kernels are launched.

`operations` has the functions to call; `launch` is how they, and kernels of plugins, are launched. Nothing here imports
triton before the first kernel is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OLDEST = (8, 0)
"""Compute capability (Ampere): what came before has no bfloat16."""

_allowed: frozenset[str] = frozenset()


def usable(device: torch.device) -> bool:
    """Return whether kernels are to be used on a device: a CUDA device that Triton compiles for, or one `allowed`."""
    return device.type in _allowed or (device.type == "cuda" and _compiles(device))


def objection(device: torch.device) -> str | None:
    """Return why no kernels can be used on a device, with what to do; None if they can, interpreted ones included."""
    from pegboard.toolkit.kernels import interpreter

    if find_spec("triton") is None:
        return "triton is not installed: pip install 'pegboard[triton]'"
    if usable(device):
        return None
    if device.type == "cuda" and not interpreter.interpreting():
        return f"its kernels need compute capability {OLDEST[0]}.{OLDEST[1]} (Ampere) or later"
    reason = interpreter.objection()
    return None if reason is None else f"no CUDA device, and no interpreter: {reason}"


def usable_on_cpu() -> bool:
    """Return `usable` of a CPU, in a tenth of the time: layers ask for it again and again."""
    return "cpu" in _allowed


@cache
def _compiles(device: torch.device) -> bool:
    import torch

    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= OLDEST


@contextmanager
def allowed(*device_types: str) -> Iterator[None]:
    """Use kernels on these types of device, too, in all threads: for tests, where Triton interprets ("cpu"), or where
    an observer keeps kernels from running ("meta").
    """
    global _allowed
    before = _allowed
    _allowed = before | frozenset(device_types)
    try:
        yield
    finally:
        _allowed = before
