"""What brings ranks into an engine whose config asks for several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.parallel import COMMUNICATOR
from pegboard.plugins.parallel.options import ParallelFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import Chooser
    from pegboard.core.interfaces.followers import Followers, FollowersContext
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.stage import DevicePart, Stage
    from pegboard.plugins.parallel.axes import Axes
    from pegboard.plugins.parallel.part import RanksPart


class RanksHooks:
    """With one rank it brings nothing. A follower's process is given its number as a service."""

    def __init__(self, options: Options) -> None:
        self._section = options.section(ParallelFields).parallel
        self._axes: Axes | None = None
        self._part: RanksPart | None = None

    @hookimpl
    def model_services(self, model: ModelContext, chooser: Chooser) -> Mapping[str, object]:
        if self._section.tensor == self._section.pipeline == 1:
            return {}
        from pegboard.plugins.parallel.axes import THIS_RANK, Axes, ThisRank
        from pegboard.toolkit.model.ranks import SERVICE

        this = model.services.get(THIS_RANK)
        axes = self._axes = Axes(self._section, this.index if isinstance(this, ThisRank) else 0)
        if isinstance(this, ThisRank):
            this.axes = axes
        axes.meet_by(lambda context: chooser.choose(COMMUNICATOR, context), model.device)
        return {SERVICE: axes.ranks}

    @hookimpl
    def pipeline_stages(self) -> list[Stage]:
        from pegboard.plugins.parallel.part import RanksStage

        return [] if self._axes is None else [RanksStage()]

    @hookimpl
    def device_parts(self) -> list[DevicePart]:
        from pegboard.plugins.parallel.part import RanksPart

        if self._axes is None:
            return []
        has_head = self._axes.ranks.sections.first
        self._part = RanksPart(follows=self._axes.index > 0 and has_head)
        return [self._part]

    @hookimpl
    def followers(self, ctx: FollowersContext) -> Followers | None:
        if self._axes is None or self._part is None:
            return None
        from pegboard.plugins.parallel.checks import check
        from pegboard.plugins.parallel.leader import Leader

        check(ctx, self._section.tensor, self._section.pipeline, self._section.timeout)
        return Leader(ctx, self._axes, self._part, self._section)
