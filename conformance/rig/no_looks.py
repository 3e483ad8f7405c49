"""A mode in which the host must not look at a device's data: whatever would wait for the device is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_LOOKS = frozenset(
    (
        "_local_scalar_dense",
        "argwhere",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    )
)
"""Operators whose result, or its size, is known only once the data is."""
_INDEXING = frozenset(("index", "index_put", "index_put_"))
_COPIES = frozenset(("copy_", "_to_copy", "to"))
"""In inference mode `to` comes as it is, and not as what it consists of."""


class LookedAtData(AssertionError):
    """The host has looked at the device, or has brought something there past the queue."""


class _NoLists(TorchFunctionMode):
    """Raises for tensors of `device` that are made of Python's numbers: torch.tensor is not one of the operators."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor) and (
            made.device.type == self._device and not (isinstance(args[0], torch.Tensor) and func is torch.as_tensor)
        ):
            raise LookedAtData(f"{func.__name__} on {self._device} brings numbers there past the queue")
        return made


class NoLooks(TorchDispatchMode):
    """Raises LookedAtData for operators on tensors of `device` that look at data, that bring host tensors there, or
    that bring tensors back. What runs on the host alone is free.
    """

    def __init__(self, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self._device = device.type
        self._lists = _NoLists(device)

    def __enter__(self) -> Any:
        TorchFunctionMode.__enter__(self._lists)
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)
        TorchFunctionMode.__exit__(self._lists, *error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [one.device.type for one in tensors_in((args, kwargs))]
        there = self._device in given
        if there and name in _LOOKS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            raise LookedAtData(f"{name} looks at data on {self._device}")
        if there and name == "where" and len(args) == 1:
            raise LookedAtData(f"where looks for places on {self._device}")
        masked = name in _INDEXING and any(one.dtype is torch.bool for one in tensors_in(args[1]))
        # One number goes to all places of a mask without a look.
        if there and masked and (name == "index" or args[2].numel() > 1):
            raise LookedAtData(f"an index of booleans looks at data on {self._device}")
        if name in _COPIES:
            source, target = given[::-1] if name == "copy_" else (given[0], _target(args, kwargs).type)
            if source != target and self._device in (source, target):
                raise LookedAtData(f"{name} from {source} to {target} goes past the queue")
        return func(*args, **kwargs)


def _target(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    """Return the device that `to` or `_to_copy` is to go to: that of the tensor itself unless another one is named."""
    for one in (kwargs.get("device"), *reversed(args)):
        if isinstance(one, torch.Tensor):
            return one.device
        if isinstance(one, torch.device):
            return one
    raise AssertionError("a copy of nothing")


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """Yield the tensors in arguments of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def watched(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `run` as a function that must not look at data of `device`."""

    def watching(*args: Any, **kwargs: Any) -> Any:
        with NoLooks(device):
            return run(*args, **kwargs)

    return watching
