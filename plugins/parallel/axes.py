"""The axes of ranks: how they are numbered, and a communicator for each group of them that meets.

Ranks are numbered section by section: rank = section * tensor + share. The ranks of a section add up their partial
sums; those with the same share, one of each section, send each other hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.plugins.parallel.api import Communicator, CommunicatorContext
from pegboard.plugins.parallel.lanes import COUNT
from pegboard.toolkit.model.ranks import Ranks
from pegboard.toolkit.model.sections import Sections

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pegboard.plugins.parallel.api import Rendezvous
    from pegboard.plugins.parallel.options import ParallelSection

THIS_RANK = "ranks.this"
"""Name of a follower's `ThisRank` in `ModelContext.services`."""


class Axes:
    """Where rank `index` stands on both axes, by the config's section, and its communicators: at most one for each."""

    def __init__(self, section: ParallelSection, index: int) -> None:
        place, share = divmod(index, section.tensor)
        self.index = index
        self.size = section.tensor * section.pipeline
        self.ranks = Ranks(section.tensor, share, Sections(section.pipeline, place, section.layers or ()))
        self.lanes = COUNT if section.pipeline > 1 else 1
        self._made: dict[str, Communicator] = {}

    def meet_by(self, choose: Callable[[CommunicatorContext], Communicator], device: torch.device) -> None:
        """Choose communicators, both of the same kind; `connect` has them meet."""
        ranks, sections = self.ranks, self.ranks.sections
        within = CommunicatorContext(ranks.size, ranks.index, device)
        across = CommunicatorContext(sections.count, sections.index, device)
        first = choose(within if ranks.size > 1 else across)
        if ranks.size > 1:
            self._made[f"section-{sections.index}"] = first
            ranks.connect(first)
        if sections.count > 1:
            second = type(first)(first.options, across) if ranks.size > 1 else first
            self._made[f"share-{ranks.index}"] = second
            sections.connect(second)

    def connect(self, meeting: Path, timeout: float) -> None:
        """Meet the other ranks, as Communicator does."""
        for name, communicator in self._made.items():
            (meeting / name).mkdir(exist_ok=True)
            communicator.connect(meeting / name, timeout)

    @property
    def reaches_machines(self) -> bool:
        """Whether the ranks may be on several machines: those of one section alone, for now."""
        kinds = {type(communicator) for communicator in self._made.values()}
        able = all(kind.connect_machines is not Communicator.connect_machines for kind in kinds)
        return able and self.ranks.sections.count == 1

    def connect_machines(self, meeting: Rendezvous, timeout: float) -> None:
        """Meet the other ranks, as Communicator does."""
        (communicator,) = self._made.values()
        communicator.connect_machines(meeting, timeout)

    def close(self) -> None:
        """Leave the others. May be called again."""
        for communicator in self._made.values():
            communicator.close()


class ThisRank:
    """What a follower knows of itself before it reads the config: its number. The plugin's hooks set `axes`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.axes: Axes | None = None
