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


@dataclass(frozen=True, slots=True)
class Check:
    """Work: compare new weights with what the model expects, in a thread. They are those of a directory, of one file
    that the API's process has written, or `tensors`. Without `partial` none may be missing.
    """

    directory: str = ""
    file: str = ""
    tensors: Mapping[str, torch.Tensor] | None = None
    partial: bool = False


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


Work = Check | Poll | Write | Forget | Read | Release


@dataclass(frozen=True, slots=True)
class Checked:
    """How far the check is: with an `error` nothing has changed. So many `tensors` are to be written."""

    done: bool
    error: str = ""
    tensors: int = 0


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
