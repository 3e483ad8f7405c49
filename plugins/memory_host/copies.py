"""Copies of whole pages between a device buffer and the host, as bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pegboard.plugins.memory_host.buffer import Part, records_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pages = NDArray[np.int64]

_CACHED = 2**18
"""Bytes on the host that are read and written before the next are: so few that they are still in the core's cache."""
_QUEUED = 2**23
"""Bytes that are on their way to or from a device at once."""


class Copies(Protocol):
    """Copies pages int64 [n] of a buffer [slots, heads, dim] to or from pages int64 [n] of a part."""

    def save(self, buffer: torch.Tensor, device: Pages, part: Part, host: Pages) -> None: ...

    def load(self, part: Part, host: Pages, buffer: torch.Tensor, device: Pages) -> None: ...


class DirectCopies:
    """For a device whose memory is the host's: from one place to the other, in the thread that asks."""

    def save(self, buffer: torch.Tensor, device: Pages, part: Part, host: Pages) -> None:
        sources = records_of(_pages_of(buffer, part))
        _check(device, sources.shape[0])
        for some in _pieces(host.shape[0], part, _CACHED):
            part.records[host[some]] = sources[device[some]]

    def load(self, part: Part, host: Pages, buffer: torch.Tensor, device: Pages) -> None:
        targets = records_of(_pages_of(buffer, part))
        _check(device, targets.shape[0])
        for some in _pieces(host.shape[0], part, _CACHED):
            targets[device[some]] = part.records[host[some]]


class QueuedCopies:
    """For a device that works through a queue: the copies are queued on the current stream.

    Neighbouring host pages of `direct` bytes on average are copied as they lie. Smaller ones go through pinned memory,
    many at a time: a copy of its own takes longer to launch than they take to copy twice.
    """

    def __init__(self, *, pinned: bool = True, direct: int = 2**15) -> None:
        self._pinned = pinned
        self._direct = direct

    @torch.inference_mode()
    def save(self, buffer: torch.Tensor, device: Pages, part: Part, host: Pages) -> None:
        pages = _pages_of(buffer, part)
        _check(device, pages.shape[0])
        sources, wanted = _words(pages), torch.from_numpy(device).to(buffer.device)
        for some in _pieces(host.shape[0], part, _QUEUED):
            gathered = sources.index_select(0, wanted[some]).view(torch.uint8)
            runs = self._runs(host[some], part)
            if runs is None:
                staged = self._staging(gathered.shape)
                staged.copy_(gathered, non_blocking=True)
                _wait(buffer.device)
                part.records[host[some]] = records_of(staged)
            else:
                for run, first in runs:
                    part.pages[first : first + run.stop - run.start].copy_(gathered[run], non_blocking=True)
                _wait(buffer.device)

    @torch.inference_mode()
    def load(self, part: Part, host: Pages, buffer: torch.Tensor, device: Pages) -> None:
        pages = _pages_of(buffer, part)
        _check(device, pages.shape[0])
        targets, wanted = _words(pages), torch.from_numpy(device).to(buffer.device)
        for some in _pieces(host.shape[0], part, _QUEUED):
            runs = self._runs(host[some], part)
            if runs is None:
                # Torch keeps pinned memory of its own until copies from it are through.
                staged = self._staging((host[some].shape[0], part.page_bytes))
                records_of(staged)[:] = part.records[host[some]]
                arriving = staged.to(buffer.device, non_blocking=True)
            else:
                shape = (host[some].shape[0], part.page_bytes)
                arriving = torch.empty(shape, dtype=torch.uint8, device=buffer.device)
                for run, first in runs:
                    arriving[run].copy_(part.pages[first : first + run.stop - run.start], non_blocking=True)
            targets.index_copy_(0, wanted[some], arriving.view(targets.dtype))

    def _runs(self, host: Pages, part: Part) -> list[tuple[slice, int]] | None:
        """Return the runs of neighbouring host pages, each as a slice of `host` and its first page; None where they are
        too short to be copied one by one.
        """
        if part.pages.is_contiguous():
            begins = np.flatnonzero(np.diff(host, prepend=host[0] - 2) != 1)
        else:
            begins = np.arange(host.shape[0])
        if host.shape[0] * part.page_bytes < begins.shape[0] * self._direct:
            return None
        bounds = [*begins.tolist(), host.shape[0]]
        return [(slice(begin, stop), int(host[begin])) for begin, stop in itertools.pairwise(bounds)]

    def _staging(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned)


def _pages_of(buffer: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a contiguous buffer as uint8 [pages, bytes], not a copy."""
    return buffer.view(torch.uint8).view(-1, part.page_bytes)


def _words(pages: torch.Tensor) -> torch.Tensor:
    """Return uint8 [pages, bytes] as [pages, words], in the largest words in which it can be seen."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if pages.shape[1] % dtype.itemsize == 0 and pages.storage_offset() % dtype.itemsize == 0:
            return pages.view(dtype)
    return pages


def _check(pages: Pages, stop: int) -> None:
    """Raise IndexError for device pages that there are not: numpy would count negative ones from the end."""
    if pages.size and not 0 <= pages.min() <= pages.max() < stop:
        raise IndexError(f"device pages run from 0 to {stop - 1}, not from {pages.min()} to {pages.max()}")


def _pieces(count: int, part: Part, nbytes: int) -> Iterator[slice]:
    """Cut `count` pages into pieces of about so many bytes."""
    step = max(1, nbytes // part.page_bytes)
    return (slice(begin, begin + step) for begin in range(0, count, step))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
