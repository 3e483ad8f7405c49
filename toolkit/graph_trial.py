"""Trying out whether a computation can be recorded as a graph: it must not look at data, and it must ask for the same
operations whatever the numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pegboard.toolkit.kernels.launch import Launch, observed

if TYPE_CHECKING:
    from torch import Tensor


class LooksAtData(RuntimeError):
    """A computation needs numbers that a device does not know yet when a graph is recorded, or brings some along."""


class Operator(Protocol):
    """An operator of torch, as a dispatch mode is shown it."""

    tags: Sequence[torch.Tag]
    is_view: bool
    _schema: torch.FunctionSchema

    def __call__(self, *args: object, **kwargs: object) -> object: ...

    def decompose(self, *args: object, **kwargs: object) -> object: ...


def name_of(operator: Operator) -> str:
    """Return an operator's name without its namespace and overload."""
    return operator._schema.name.rpartition("::")[2]


def tensors_in(value: object) -> list[Tensor]:
    """Return all tensors of an operator's arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def check_operator(operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise LooksAtData for an operator for which the host has to wait, or that brings data from there."""
    name, tags = name_of(operator), operator.tags
    if name == "lift_fresh":
        if any(one.dim() for one in tensors_in(args)):
            raise LooksAtData("a tensor is made of the host's data while a graph is recorded: it would stay as it is")
        return
    if torch.Tag.data_dependent_output in tags:
        raise LooksAtData(f"{operator} looks at data while a graph is recorded: a replay would not run it")
    chosen = name.startswith(("index", "_index_put")) and _picks(name, args)
    sized = torch.Tag.dynamic_output_shape in tags and name != "index" and kwargs.get("output_size") is None
    if chosen or sized:
        raise LooksAtData(f"{operator} has a result whose shape depends on data, while a graph is recorded")


def _picks(name: str, args: Sequence[object]) -> bool:
    """Return whether an indexing operator has a mask for an index, whose true ones would have to be counted. With one
    value for all of them it is a masked fill.
    """
    if len(args) < 2 or not isinstance(args[1], list | tuple):
        return False
    masks = any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(args[1]))
    value = args[2] if len(args) > 2 else None
    filled = name != "index" and isinstance(value, torch.Tensor) and value.numel() == 1
    return masks and not filled


_READS = frozenset({"numpy", "tolist", "__array__", "cpu", "__reduce_ex__"})
"""Methods of tensors whose operators do not show that they read data. `cpu` would be a copy to the host elsewhere."""


class RefusingReads(TorchFunctionMode):
    """Raises LooksAtData for methods that read data without an operator that shows it, unless `paused` is true."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        super().__init__()
        self._paused = paused

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _READS and not self._paused():
            raise LooksAtData(f"Tensor.{name} while a graph is recorded: a replay would not run it")
        return func(*args, **({} if kwargs is None else kwargs))


Step = tuple[str, object, object]
"""An operation: its name, and what its arguments look like."""


class OperatorMode(TorchDispatchMode):
    """Runs a computation through `operator`, one operator of torch after the other, but for what happens while it is
    `paused`. If it is `strict`, it raises LooksAtData for operators that no graph can have.
    """

    def __init__(self, *, strict: bool) -> None:
        TorchDispatchMode.__init__(self)
        self.paused = False
        self._strict = strict

    def operator(self, func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Run an operator that is not made of others; its result."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = {} if kwargs is None else kwargs
        if self.paused:
            return func(*args, **named)
        if self._strict:
            check_operator(func, args, named)
            with self:  # in inference mode what is made of other operators comes as it is
                found = func.decompose(*args, **named)
            if found is not NotImplemented:
                return found
        return self.operator(func, args, named)

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


class Recording(OperatorMode):
    """Notes which operations are asked for. If `strict`, copies between host and device raise LooksAtData, too."""

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self.steps: list[Step] = []

    def operator(self, func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self.steps.append((str(func), seen(args), seen(kwargs)))
        found = func(*args, **kwargs)
        if self._strict:
            _check_devices(func, [*args, *kwargs.values()], found)
        return found

    def note(self, launch: Launch) -> bool:
        """Learn of a launch. It happens, and what Triton's interpreter then asks of torch is not noted."""
        name = str(getattr(launch.kernel, "__name__", launch.kernel))
        self.steps.append((f"{name} {launch.grid}", seen(launch.arguments), seen(launch.constants)))
        with self.pause():
            launch()
        return False


def _check_devices(operator: Operator, given: Sequence[object], found: object) -> None:
    """Raise LooksAtData for an operator whose tensors are on several devices. Single numbers may be on the host."""
    results = tensors_in(found)
    devices = {one.device.type for one in results} | {one.device.type for one in tensors_in(list(given)) if one.dim()}
    if len(devices) > 1:
        raise LooksAtData(f"{operator} copies between host and device while a graph is recorded")


def seen(value: object) -> object:
    """Return what an argument looks like: all of it, but shapes and types in place of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    if isinstance(value, dict):
        return {name: seen(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(seen(one) for one in value)
    return value


def operations_of(run: Callable[[], object]) -> list[Step]:
    """Return what a run asks for. Raise LooksAtData where no graph could have it."""
    recording = Recording(strict=True)
    with RefusingReads(lambda: recording.paused), recording, observed(recording.note):
        run()
    return recording.steps


def first_difference(first: Sequence[Step], second: Sequence[Step]) -> str | None:
    """Return which operation of two runs is not the same, None for none."""
    for place, (one, other) in enumerate(zip_longest(first, second)):
        if one != other:
            names = [step[0] if step is not None else "nothing" for step in (one, other)]
            what = " and then ".join(names) if names[0] != names[1] else f"{names[0]} with other shapes or numbers"
            return f"operation {place} is {what}"
    return None
