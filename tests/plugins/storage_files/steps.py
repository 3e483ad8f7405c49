"""Runs operations on files one system call at a time, in every order that makes a difference."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pegboard.plugins.storage_files import folders, room, storage

STOPS = ("open", "mkdir", "rmdir", "unlink", "rename", "scandir", "stat")
"""Calls whose order matters: they read or change names."""

Operation = Callable[[], object]


class Running:
    """An operation in a thread of its own, which stops before each of its calls until `step` lets it make that one."""

    def __init__(self, operation: Operation, number: int) -> None:
        self.number = number
        self.result: object = None
        self.ended = False
        self.free = False
        """Whether it stops no more."""
        self.past: list[object] = []
        """Its calls and what they gave: what it does next depends on nothing else."""
        self.open: dict[int, None] = {}
        self._operation = operation
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        _operations[self._thread] = self
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Let it make one call, and go on to the next."""
        self._go.release()
        self._wait()

    def finish(self) -> None:
        """Let it run to its end."""
        self.free = True
        if not self.ended:
            self.step()
        self._thread.join()
        del _operations[self._thread]

    def call(self, name: str, args: Sequence[object], kwargs: dict[str, object]) -> object:
        """Make a call once it is this operation's turn."""
        if not self.free:
            self._stopped.release()
            assert self._go.acquire(timeout=60)
        try:
            found = getattr(os, name)(*args, **kwargs)
        except OSError as error:
            self.past.append((name, error.errno))
            raise
        if name == "scandir":
            with found:
                found = contextlib.nullcontext(list(found))
            self.past.append((name, *(entry.name for entry in found.enter_result)))
        elif name == "stat":
            self.past.append((name, found.st_mode, found.st_size))
        else:
            self.past.append(name)
            if name == "open":
                self.open[found] = None
        return found

    def random(self, count: int) -> bytes:
        """Return the same bytes each time, and others in each operation."""
        return bytes([self.number] * count)

    def close(self, fd: int) -> None:
        """Close a file, without a stop: nothing else notices."""
        self.open.pop(fd, None)
        os.close(fd)

    def state(self) -> object:
        """Return what its next calls depend on, apart from the files."""
        return tuple(self.past), tuple(str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in self.open)

    def _wait(self) -> None:
        assert self._stopped.acquire(timeout=60), "an operation does not end"

    def _run(self) -> None:
        try:
            self.result = self._operation()
        except Exception as error:
            self.result = error
        self.ended = True
        self._stopped.release()


_operations: dict[threading.Thread, Running] = {}


class _Os:
    """The module `os`, whose calls stop in the threads of operations."""

    def __getattr__(self, name: str) -> object:
        running = _operations.get(threading.current_thread())
        if running is None:
            return getattr(os, name)
        if name == "close":
            return running.close
        if name == "urandom":
            return running.random
        if name in STOPS:
            return lambda *args, **kwargs: running.call(name, args, kwargs)
        return getattr(os, name)


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Let the calls of the storage stop where `every_order` wants."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (folders, room, storage):
            if hasattr(module, "os"):
                patch.setattr(module, "os", _Os())
        yield


def every_order(root: Path, prepare: Operation, operations: Sequence[Operation]) -> Iterator[list[object]]:
    """Run the operations at once, in every order of their calls that leads to a state of its own: of the names below
    `root`, and of what each operation has seen so far. Yield their results at the end of each run; an exception is one,
    too.
    """
    todo: list[tuple[int, ...]] = [()]
    seen: set[object] = set()
    while todo:
        order = todo.pop()
        prepare()
        running = [Running(operation, number) for number, operation in enumerate(operations)]
        taken: list[int] = []
        known = False
        while not known and (left := [one.number for one in running if not one.ended]):
            if len(taken) < len(order):
                turn = order[len(taken)]
            else:
                state = (_names(root), *(one.state() for one in running))
                known = state in seen
                seen.add(state)
                turn, *others = left
                todo += [] if known else [(*taken, other) for other in others]
            if not known:
                running[turn].step()
                taken.append(turn)
        for one in running:
            one.finish()
        if not known:
            yield [one.result for one in running]


def _names(root: Path) -> tuple[str, ...]:
    """Return what stands below a folder, each with its kind."""
    found = []
    for above, names, files in os.walk(root):
        found += [f"{above}/{name}/" for name in names] + [f"{above}/{name}" for name in files]
    return tuple(sorted(found))
