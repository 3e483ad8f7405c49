"""A CPU's graphs: every operator and every kernel launch of a run, written down with its memory, and done again.

::

    capture = TapeCapture()
    replay, logits = capture.capture(lambda: network.logits(network.forward(static.batch)))
    static.fill(batch)
    replay()  # `logits` has those of the new batch

What a replay does is what a CUDA graph would do: the same operators on the same memory with the scalars that they were
given, and no Python of the model. So what has to be static and is not gives wrong numbers on a laptop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pegboard.toolkit.kernels.launch import Launch, observed

if TYPE_CHECKING:
    from pegboard.core.interfaces.graphs import Replay

T = TypeVar("T")


class LooksAtData(RuntimeError):
    """What runs while a graph is recorded wants to know, or brings along, what a device does not know yet."""


class _Operator(Protocol):
    """One of torch's, as a dispatch mode is shown it."""

    tags: Sequence[torch.Tag]
    _schema: torch.FunctionSchema

    def __call__(self, *args: object, **kwargs: object) -> object: ...

    def decompose(self, *args: object, **kwargs: object) -> object: ...


_LOOKS = frozenset({"numpy", "tolist", "__array__", "cpu", "__reduce_ex__"})
"""Methods of tensors whose operators do not show that they read data. `cpu` would be a copy to the host elsewhere."""

_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that only take memory: a graph has no part of them."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operator with its frozen arguments, and where each of its new tensors is kept."""

    func: _Operator
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    fresh: tuple[tuple[int, torch.Tensor], ...]

    def __call__(self) -> None:
        found = _tensors(self.func(*self.args, **self.kwargs))
        for place, kept in self.fresh:
            kept.copy_(found[place])


class _Tape:
    """What one graph does, and the memory that is its own."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.own: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.own)

    def spoil(self) -> None:
        """Overwrite the memory, as another graph of the same pool may."""
        for one in self.own:
            one.fill_(torch.nan if one.dtype.is_floating_point else 0)


class TapeCapture:
    """Records on a CPU; see GraphCapture. A replay spoils the memory of the graph that was replayed before it, if that
    is another one; what a capture returned is spoiled until the first replay. (A capture itself computes, and so writes
    to memory that is not its own; a device's only records.)

    `limit` is how many bytes all graphs may take: torch.OutOfMemoryError is raised beyond it. `captured` and `replayed`
    count.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.captured = 0
        self.replayed = 0
        self.warmed = 0
        self._tapes: weakref.WeakSet[_Tape] = weakref.WeakSet()
        self._last: _Tape | None = None

    def warm(self, run: Callable[[], T]) -> T:
        self.warmed += 1
        return run()

    def capture(self, run: Callable[[], T]) -> tuple[Replay, T]:
        tape = _Tape()
        recorder = _Recorder(tape)
        with _Refusing(recorder), recorder, observed(recorder.launched):
            found = run()
        if self.limit is not None and self.memory() + tape.nbytes > self.limit:
            raise torch.OutOfMemoryError(f"graphs may take {self.limit} bytes, and one more needs {tape.nbytes}")
        tape.spoil()
        self._tapes.add(tape)
        self.captured += 1

        @torch.inference_mode()
        def replay() -> None:
            if self._last is not None and self._last is not tape:
                self._last.spoil()
            self._last = tape
            self.replayed += 1
            for step in tape.steps:
                step()

        return replay, found

    def memory(self) -> int:
        return sum(tape.nbytes for tape in self._tapes)


class _Recorder(TorchDispatchMode):
    """Writes to a tape what operators come by."""

    def __init__(self, tape: _Tape) -> None:
        TorchDispatchMode.__init__(self)
        self._tape = tape
        self.paused = False

    def __torch_dispatch__(
        self,
        func: _Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = {} if kwargs is None else kwargs
        if self.paused:
            return func(*args, **named)
        _check(func, args, named)
        with self:
            found = func.decompose(*args, **named)
        if found is not NotImplemented:
            return found
        found = func(*args, **named)
        self._note(func, args, named, found)
        return found

    def _note(self, func: _Operator, args: Sequence[object], kwargs: Mapping[str, object], found: object) -> None:
        name = _name(func)
        known = {0, *(_memory(one) for one in _tensors([*args, *kwargs.values()]))}
        new = [(place, one.detach()) for place, one in enumerate(_tensors(found)) if _memory(one) not in known]
        self._tape.own += [one for _, one in new]
        if name in _UNWRITTEN or torch.Tag.inplace_view in func.tags:
            return
        if new or func._schema.is_mutable:
            frozen = tuple(map(_frozen, args)), {key: _frozen(value) for key, value in kwargs.items()}
            self._tape.steps.append(_Operation(func, *frozen, tuple(new)))

    def launched(self, launch: Launch) -> bool:
        """Note a kernel and run it. What an interpreter does inside stays outside."""
        with self._aside():
            frozen = tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in launch.arguments)
            again = Launch(launch.kernel, launch.grid, frozen, launch.constants)
            again()
        self._tape.steps.append(again)
        return False

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


class _Refusing(TorchFunctionMode):
    """Refuses methods that read data without an operator that shows it."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _LOOKS and not self._recorder.paused:
            raise LooksAtData(f"Tensor.{name} while a graph is recorded: a replay would not run it")
        return func(*args, **({} if kwargs is None else kwargs))


def _check(func: _Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise LooksAtData for an operator for which the host has to wait, or that brings data from there."""
    name, tags = _name(func), func.tags
    if name == "lift_fresh":
        if any(one.dim() for one in _tensors(args)):
            raise LooksAtData("a tensor is made of the host's data while a graph is recorded: it would stay as it is")
        return
    if torch.Tag.data_dependent_output in tags:
        raise LooksAtData(f"{func} looks at data while a graph is recorded: a replay would not run it")
    chosen = name.startswith(("index", "_index_put")) and _picks(name, args)
    sized = torch.Tag.dynamic_output_shape in tags and name != "index" and kwargs.get("output_size") is None
    if chosen or sized:
        raise LooksAtData(f"{func} has a result whose shape depends on data, while a graph is recorded")


def _picks(name: str, args: Sequence[object]) -> bool:
    """Return whether an indexing operator has a mask for an index, whose true ones would have to be counted. With one
    value for all of them it is a masked fill.
    """
    if len(args) < 2 or not isinstance(args[1], list | tuple):
        return False
    masks = any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1]))
    value = args[2] if len(args) > 2 else None
    filled = name != "index" and isinstance(value, torch.Tensor) and value.numel() == 1
    return masks and not filled


def _name(func: _Operator) -> str:
    return func._schema.name.rpartition("::")[2]


def _tensors(value: object) -> list[torch.Tensor]:
    """Return all tensors of an operator's arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _frozen(value: Any) -> object:
    """Return an argument as it is now: tensors with their memory, shape and strides, whatever becomes of them."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(map(_frozen, value))
    return value


def _memory(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's memory from others'; 0 without any. Packed weights have none that can be seen."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
