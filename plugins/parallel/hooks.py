"""What brings ranks into an engine whose config asks for several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.parallel import COMMUNICATOR, RANK_LAUNCHER
from pegboard.plugins.parallel.options import ParallelFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import Chooser
    from pegboard.core.interfaces.followers import Followers, FollowersContext
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.stage import DevicePart, Stage
    from pegboard.plugins.parallel.api import Communicator
    from pegboard.plugins.parallel.part import RanksPart
    from pegboard.toolkit.model.ranks import Ranks


class RanksHooks:
    """Without `parallel.tensor` above 1 it brings nothing. A follower's process is given its place as a service."""

    def __init__(self, options: Options) -> None:
        self._section = options.section(ParallelFields).parallel
        self._ranks: Ranks | None = None
        self._communicator: Communicator | None = None
        self._part: RanksPart | None = None

    @hookimpl
    def model_services(self, model: ModelContext, chooser: Chooser) -> Mapping[str, object]:
        if self._section.tensor == 1:
            return {}
        from pegboard.plugins.parallel.api import CommunicatorContext
        from pegboard.toolkit.model.ranks import SERVICE, Ranks

        given = model.services.get(SERVICE)
        ranks = self._ranks = given if isinstance(given, Ranks) else Ranks(self._section.tensor)
        context = CommunicatorContext(ranks.size, ranks.index, model.device)
        self._communicator = chooser.choose(COMMUNICATOR, context)
        ranks.connect(self._communicator)
        return {SERVICE: ranks}

    @hookimpl
    def pipeline_stages(self) -> list[Stage]:
        from pegboard.plugins.parallel.part import RanksStage

        return [] if self._ranks is None else [RanksStage()]

    @hookimpl
    def device_parts(self) -> list[DevicePart]:
        from pegboard.plugins.parallel.part import RanksPart

        if self._ranks is None:
            return []
        self._part = RanksPart(self._ranks.index)
        return [self._part]

    @hookimpl
    def followers(self, ctx: FollowersContext) -> Followers | None:
        if self._ranks is None or self._communicator is None or self._part is None:
            return None
        from pegboard.plugins.parallel.api import Communicator, LaunchContext
        from pegboard.plugins.parallel.checks import check
        from pegboard.plugins.parallel.leader import Leader

        check(ctx, self._section.tensor, self._section.timeout)
        facts = ctx.facts()  # before a launcher is chosen, which followers have none of
        machines = type(self._communicator).connect_machines is not Communicator.connect_machines
        context = LaunchContext(self._section.tensor, self._section.cores, ctx.module, machines)
        launcher = ctx.choose.choose(RANK_LAUNCHER, context)
        return Leader(ctx, facts, launcher, self._communicator, self._part, self._ranks.size, self._section.timeout)
