"""What the halves of the stage tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

NAME = "weight_updates"
Tag = Literal["kv_cache", "weights"]
TAGS: tuple[Tag, ...] = get_args(Tag)
ASK_AGAIN = 0.05
"""Seconds between two questions how far a check is, or whether the ranks of a group have met."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a trainer's group meet, and which of so many this server is."""

    name: str
    address: str
    port: int
    rank: int
    size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Announced:
    """The names, types and shapes of the tensors that the ranks of a `group` get, in that order."""

    group: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """A `directory` of weights, links resolved, and `stamps` of its files, by path: what differs once a file is written
    to, or replaced.
    """

    directory: str
    stamps: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Check:
    """Work: compare new weights with what the model expects, in a thread. They are those of a directory, of one file
    that the API's process has written, `tensors`, or `announced` by a trainer, of which the first has to come, too.
    Without `partial` none may be missing. With an `origin` the directory must have the files that it had then.
    """

    directory: str = ""
    file: str = ""
    tensors: Mapping[str, torch.Tensor] | None = None
    announced: Announced | None = None
    partial: bool = False
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Poll:
    """Work: tell how far the check is (Checked)."""


@dataclass(frozen=True, slots=True)
class Write:
    """Work: write what was checked, for about so many seconds (Written)."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Work: let go of new weights; True."""


@dataclass(frozen=True, slots=True)
class Read:
    """Work: return the first numbers of a tensor, `most` at most (Numbers)."""

    name: str
    most: int


@dataclass(frozen=True, slots=True)
class Release:
    """Work: give memory back (a dict of bytes by tag)."""

    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Work: meet the other ranks of a trainer's group, in a thread (None)."""

    meeting: Meeting


@dataclass(frozen=True, slots=True)
class Joining:
    """Work: tell how far that is (Checked)."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Work: leave a trainer's group; whether there was one of that name."""

    group: str


Work = Check | Poll | Write | Forget | Read | Release | Join | Joining | Leave


@dataclass(frozen=True, slots=True)
class Checked:
    """How far a check, or a meeting, is: with an `error` nothing has changed. `tensors` are to be written; those of a
    directory are those of `origin`.
    """

    done: bool
    error: str = ""
    tensors: int = 0
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """How far writing is. With an `error` it has ended; if it had not `begun`, nothing has changed."""

    done: bool = False
    error: str = ""
    begun: bool = True


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of a tensor, and its whole shape and type."""

    values: list[float]
    shape: tuple[int, ...]
    dtype: str
