"""The directory of a run. Whatever is in it is whole: files are renamed to their names once they are on disk.

So a run may be killed at any moment, and the same command goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.train_draft.settings import AnswerSettings, TrainSettings

FORMAT = 1
_OPTIONS = {
    "model": "the model",
    "prompts": "the prompts (--prompts, --seed)",
    "greedy": "--greedy-share",
    "tokens": "--tokens",
    "learning_rate": "--learning-rate",
    "taps": "--taps",
}
_TRAIN_OPTIONS = {**_OPTIONS, "tokens": "--train-tokens"}


class WorkDir:
    """DIR: the head, its config and its card; in `work` all that a run needs to go on. One run at a time holds it."""

    def __init__(self, directory: Path, *, data: Path | None = None) -> None:
        """Take answers and states from `data`, the directory of another run, where it is given."""
        self.directory = directory
        self.work = directory / "work"
        self.data = self.work if data is None else data / "work"
        self.borrows = data is not None
        self._lock: IO[str] | None = None

    @contextlib.contextmanager
    def held(self, *, overwrite: bool) -> Iterator[None]:
        """Make the directory and hold it. With `overwrite` an earlier run in it is thrown away.

        Raises PegboardError where another run holds it, and where there is something in it that is not a run's.
        """
        try:
            self._open(overwrite)
        except OSError as error:
            raise PegboardError(f"--out: {error.filename or self.directory}: {error.strerror}") from None
        try:
            yield
        finally:
            if self._lock is not None:
                self._lock.close()

    def _open(self, overwrite: bool) -> None:
        if self.directory.exists() and not self.directory.is_dir():
            raise PegboardError(f"--out: {self.directory} is not a directory")
        if self.directory.exists() and any(self.directory.iterdir()) and not (self.work / "lock").exists():
            raise PegboardError(f"--out: {self.directory} is not empty, and what is in it is not a run of train-draft")
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = (self.work / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise PegboardError(f"--out: another run is writing to {self.directory}") from None
        if overwrite:
            for path in (*self.work.iterdir(), *(self.directory / name for name in RESULTS)):
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    # ---- settings ---------------------------------------------------------------------------------------------------

    def settle_answers(self, settings: AnswerSettings, taps: tuple[int, ...] | None) -> AnswerSettings:
        """Write the settings of the answers down, or compare them with those of the run that is here. Return those
        that hold: of another run's answers its own. Raises PegboardError where they differ.
        """
        known = read_json(self.data / "answers.json")
        if self.borrows:
            if known is None or not (self.data / "target.safetensors").exists():
                raise PegboardError(f"--data: {self.data.parent} has no finished answers and states of train-draft")
            found = msgspec.convert({name: known.get(name) for name in _names(AnswerSettings)}, AnswerSettings)
            if found.model != settings.model:
                raise PegboardError(
                    f"--data: those are answers of {found.model}, and the config names {settings.model}"
                )
            return found
        asked = {**dataclasses.asdict(settings), "taps": None if taps is None else list(taps)}
        self._settle(self.data / "answers.json", asked, known, _OPTIONS)
        return settings

    def settle_training(self, settings: TrainSettings) -> None:
        """As `settle_answers`, for the training."""
        path = self.work / "training.json"
        self._settle(path, dataclasses.asdict(settings), read_json(path), _TRAIN_OPTIONS)

    def _settle(
        self, path: Path, asked: Mapping[str, object], known: Mapping[str, object] | None, options: Mapping[str, str]
    ) -> None:
        asked = {"format": FORMAT, **asked}
        if known is None:
            write_json(path, asked)
            return
        differ = [name for name in asked if known.get(name) != asked[name]]
        if differ:
            told = ", ".join(_told(options, name, asked[name], known.get(name)) for name in differ)
            raise PegboardError(
                f"--out: {self.directory} holds a run with other settings: {told}; go back to these to go on with it, "
                "name another directory, or throw the run away with --overwrite"
            )

    # ---- disk -------------------------------------------------------------------------------------------------------

    def check_space(self, needed: int, what: str) -> None:
        """Raise PegboardError where `needed` bytes are more than the disk has left."""
        free = shutil.disk_usage(self.work).free
        if needed > free:
            raise PegboardError(
                f"--out: {what} take about {needed / 1e9:.1f} GB, and {self.directory} has {free / 1e9:.1f} GB left"
            )

    # ---- time -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add to the time that a stage has taken over all runs, but for those that were killed."""
        began = time.monotonic()
        try:
            yield
        finally:
            path = self.work / "seconds.json"
            times = read_json(path) or {}
            times[stage] = round(float(str(times.get(stage, 0.0))) + time.monotonic() - began, 1)
            write_json(path, times)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far; of borrowed answers and states those of their run."""
        found: dict[str, float] = {}
        for folder in (self.data, self.work):
            known = read_json(folder / "seconds.json") or {}
            found |= {name: float(str(value)) for name, value in known.items()}
        return found


RESULTS = ("config.json", "model.safetensors", "README.md")
"""What is in DIR in the end."""


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _told(options: Mapping[str, str], name: str, asked: object, known: object) -> str:
    option = options.get(name) or f"--{name.replace('_', '-')}"
    if name == "prompts":
        return f"{option} are others"
    return f"{option} is {asked} and was {known}"


def read_json(path: Path) -> dict[str, object] | None:
    """Return the object in a file; None where there is no file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PegboardError(f"{path} cannot be read: {error}; --overwrite starts anew") from None
    if not isinstance(found, dict):
        raise PegboardError(f"{path} is not an object; --overwrite starts anew")
    return found


def write_json(path: Path, value: object) -> None:
    with replacing(path) as new:
        new.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Lend a path to write to, whose file takes the place of `path` once it is on disk, or leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        with new.open("rb+") as stream:
            # Some libraries write files that only their owner may read.
            os.fchmod(stream.fileno(), 0o666 & ~_umask())
            os.fsync(stream.fileno())
        new.replace(path)
    except OSError as error:
        raise PegboardError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
