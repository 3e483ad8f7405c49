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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pegboard.toolkit.graph_trial import Operator, OperatorMode, RefusingReads, name_of, tensors_in
from pegboard.toolkit.kernels.launch import Launch, observed

if TYPE_CHECKING:
    from pegboard.core.interfaces.graphs import Replay

T = TypeVar("T")


_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that only take memory: a graph has no part of them."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operator with its frozen arguments, and where each of its new tensors is kept."""

    func: Operator
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    fresh: tuple[tuple[int, torch.Tensor], ...]

    def __call__(self) -> None:
        found = tensors_in(self.func(*self.args, **self.kwargs))
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
        with RefusingReads(lambda: recorder.paused), recorder, observed(recorder.launched):
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


class _Recorder(OperatorMode):
    """Writes to a tape what operators come by."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__(strict=True)
        self._tape = tape

    def operator(self, func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        found = func(*args, **kwargs)
        self._note(func, args, kwargs, found)
        return found

    def _note(self, func: Operator, args: Sequence[object], kwargs: Mapping[str, object], found: object) -> None:
        name = name_of(func)
        known = {0, *map(_memory, tensors_in([*args, *kwargs.values()]))}
        results = enumerate(tensors_in(found))
        new = [(place, result.detach()) for place, result in results if _memory(result) not in known]
        self._tape.own += [result for _, result in new]
        if name in _UNWRITTEN or torch.Tag.inplace_view in func.tags:
            return
        if new or func._schema.is_mutable:
            frozen = tuple(map(_frozen, args)), {key: _frozen(value) for key, value in kwargs.items()}
            self._tape.steps.append(_Operation(func, *frozen, tuple(new)))

    def launched(self, launch: Launch) -> bool:
        """Note a kernel and run it. What an interpreter does inside stays outside."""
        with self.pause():
            frozen = tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in launch.arguments)
            again = Launch(launch.kernel, launch.grid, frozen, launch.constants)
            again()
        self._tape.steps.append(again)
        return False


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
