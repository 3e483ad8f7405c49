"""What a storage does to its place, to its process and to other threads: a part of the suite of KVStorage."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from pegboard.conformance.rig.dying import state_of
from pegboard.conformance.rig.footprint import growing, growth, with_class
from pegboard.conformance.rig.interrupting import ended, interrupted
from pegboard.plugins.kv_tiers.api import KVStorageContext
from pegboard.plugins.kv_tiers.suite.storage_rig import StorageRig, Stores, Talk, numbered

POINTS = 24
"""Lines of a call, about, in each of which another one runs."""

MANY = 64
KEPT_BYTES = 24
"""Bytes that may be kept of each of so many keys that are deleted."""

SOON = 5.0
"""Seconds within which threads end that `close` has told to."""


@dataclass(frozen=True)
class Meeting:
    """Two calls at once, about a key a and a key b: the first so many of them are `there` before. `stay` and `gone` are
    the places of those that are there afterwards, and of those that are not, whichever call is the first.
    """

    call: Callable[[Talk, bytes, bytes], object]
    between: Callable[[Talk, bytes, bytes], object]
    there: int = 0
    stay: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


def _replace(talk: Talk, a: bytes, b: bytes) -> None:
    """Delete one block and write another one, which may come to lie where that was."""
    talk.storage.delete([a])
    talk.written([b])


MEETINGS: Mapping[str, Meeting] = MappingProxyType(
    {
        "read_amid_set": Meeting(lambda talk, a, b: talk.written([a]), lambda talk, a, b: talk.read([a]), 0, (0,)),
        "set_amid_set": Meeting(lambda talk, a, b: talk.written([a]), lambda talk, a, b: talk.written([b]), 0, (0, 1)),
        "the_same_set_amid_set": Meeting(
            lambda talk, a, b: talk.written([a]), lambda talk, a, b: talk.written([a]), 0, (0,)
        ),
        "get_amid_get": Meeting(lambda talk, a, b: talk.read([a]), lambda talk, a, b: talk.read([b]), 2, (0, 1)),
        "replaced_amid_get": Meeting(lambda talk, a, b: talk.read([a]), _replace, 1, (1,), (0,)),
        "deleted_amid_exists": Meeting(
            lambda talk, a, b: talk.has([a]), lambda talk, a, b: talk.storage.delete([a]), 1, (), (0,)
        ),
        "set_amid_delete": Meeting(lambda talk, a, b: talk.storage.delete([a]), lambda talk, a, b: talk.put([a]), 1),
        "cleared_amid_set": Meeting(lambda talk, a, b: talk.put([a]), lambda talk, a, b: talk.storage.clear()),
    }
)
"""What may meet, by what happens within the first call."""


class StorageConductTests(StorageRig):
    """`supports` changes nothing, `close` leaves nothing open, and calls at once do not see each other's halves."""

    def test_supports_changes_nothing(self, stores: Stores, tmp_path: Path) -> None:
        """Neither before there is anything, nor beside a storage that works."""
        options, cls = self.make_options(**stores.options), self.provider_class()
        ctx = KVStorageContext(stores.identity, 96)
        before = state_of(tmp_path)
        cls.supports(options, ctx)
        after = state_of(tmp_path)
        assert after == before, f"supports() has changed {_differences(before, after)}: it only looks"
        talk, keys = stores.open(), numbered(3)
        talk.written(keys)
        files = _open_files()
        cls.supports(options, ctx)
        left = _open_files() - files
        assert not left, f"supports() leaves open {', '.join(sorted(left))}"
        talk.holds(keys, "after supports() was asked beside it")

    def test_close_lets_go(self, stores: Stores) -> None:
        """Of files and of threads. Connections are not looked at."""
        files, threads = _open_files(), set(threading.enumerate())
        talk = stores.open()
        talk.written(numbered(3))
        talk.holds(numbered(3))
        stores.close(talk)
        left = _open_files() - files
        assert not left, f"close() leaves open {', '.join(sorted(left))}"
        until = time.monotonic() + SOON
        while running := set(threading.enumerate()) - threads:
            names = ", ".join(sorted(thread.name for thread in running))
            assert time.monotonic() < until, f"close() leaves threads running: {names}"
            time.sleep(0.01)

    def test_keys_are_not_kept(self, stores: Stores) -> None:
        """What is deleted is forgotten, and so is what was asked for and never there."""
        talk, numbers = stores.open(16), itertools.count(0, 2 * MANY)

        def work() -> None:
            keys = numbered(2 * MANY, next(numbers))
            talk.lacks(keys[:8], "were never written")
            for key in keys[MANY:]:
                talk.has([key])
            talk.written(keys[:MANY])
            talk.storage.delete(keys[:MANY])

        storage = talk.storage
        grown = growth(work, KEPT_BYTES * MANY, with_class(storage), storage.ctx, storage.options)
        assert grown <= KEPT_BYTES * MANY, (
            f"it keeps {grown:,} bytes more after each {MANY} blocks that were written and deleted, and {MANY} keys "
            f"that were never there{growing(work, storage)}: forget keys that are gone, or bound what is remembered"
        )

    def test_a_folder_may_be_replaced(self, stores: Stores, tmp_path: Path) -> None:
        """By an empty one, as an operator does who makes room, or a disk that is mounted again: after an error or two
        it works there.
        """
        folders = {path if path.is_dir() else path.parent for path in _paths_below(stores.options, tmp_path)}
        talk, keys = stores.open(), numbered(6)
        talk.written(keys[:3])
        folders |= {path if path.is_dir() else path.parent for path in _paths_below(stores.options, tmp_path)}
        if not folders:
            pytest.skip("place() names no file or folder of the test")
        for number, folder in enumerate(sorted(folders)):
            folder.rename(folder.with_name(f"{folder.name}.replaced-{number}"))
            folder.mkdir(mode=0o700)
        errors, done = [], list[int]()

        def work() -> None:
            talk.read(keys[:1])
            done.append(talk.put(keys))

        for _ in range(4):
            try:
                ended(work)
            except AssertionError:
                raise
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            if len(keys) in done:
                talk.holds(keys, "after its folder was replaced by an empty one")
                return
        said = "; ".join(errors) or "set writes less than it was given"
        pytest.fail(
            f"its folder was replaced by an empty one, and it does not work again: {said}. Open the place anew where a "
            "call fails"
        )

    @pytest.mark.parametrize("what", MEETINGS)
    def test_calls_may_meet_anywhere(self, stores: Stores, what: str) -> None:
        """Another thread's call comes in between any two lines of a call. Whichever of the two counts as the first:
        what is read belongs to its key, what neither was about stays, and what is written next is there.
        """
        talk, meeting, others = stores.open(64), MEETINGS[what], numbered(3)
        turn = at = 0
        lines = 1
        while at < lines:
            a, b = keys = numbered(2, 100 + 2 * turn)
            talk.written([*others, *keys[: meeting.there]])
            lines = interrupted(lambda: meeting.call(talk, a, b), lambda: meeting.between(talk, a, b), at)  # noqa: B023
            when = f"where {what} at line {at} of {lines} of the first call"
            if what != "cleared_amid_set":
                talk.holds(others, f"though neither call was about them, {when}")
            talk.holds([keys[place] for place in meeting.stay], when)
            talk.lacks([keys[place] for place in meeting.gone], f"were deleted, {when},")
            talk.written(keys)
            talk.holds(keys, f"after they were written again, {when}")
            talk.storage.delete(keys)
            turn, at = turn + 1, at + max(1, -(-lines // POINTS))


def _paths_below(options: Mapping[str, object], folder: Path) -> set[Path]:
    """Return what exists of the paths that options name, within a folder."""
    paths = {Path(value) for value in options.values() if isinstance(value, str | Path)}
    return {path for path in paths if path.is_absolute() and path.is_relative_to(folder) and path.exists()}


def _differences(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return ", ".join(f"{name} ({'new' if name not in before else 'changed'})" for name in names)


def _open_files() -> Counter[str]:
    """Return the files and folders that this process has open or mapped, where the system tells; no libraries."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found[str(link.readlink())] += 1
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
            found.update(line.split(maxsplit=5)[5:])
    system = ("/dev/", "/proc/", "/sys/")
    return Counter({n: c for n, c in found.items() if n[:1] == "/" and not n.startswith(system) and ".so" not in n})
