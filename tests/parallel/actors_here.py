"""What a launcher does that reaches other machines, without any: its actors are objects of this process."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.launch_ray.actor import RankActor
from pegboard.plugins.parallel.api import LaunchContext, RankHandle, RankLauncher
from pegboard.toolkit.system.keyed_sockets import KeyedListener, new_key

SECONDS = 60.0


class ActorsHere(RankLauncher[NoOptions]):
    """Starts ranks as the launcher `ray` does, but that Ray is left out."""

    def __init__(self, options: NoOptions, ctx: LaunchContext) -> None:
        super().__init__(options, ctx)
        self.listener = KeyedListener("127.0.0.1")
        self.address = self.listener.address

    def start(self, line: Callable[[int], bytes]) -> RankHandle:
        key, actor = new_key(), RankActor()
        coming = self.listener.expect(key)
        file, _ = actor.connect(self.listener.address, key)
        connection = coming.result(SECONDS)
        pid = actor.run(self.ctx.module, line(file), self.ctx.threads)
        handle = _Rank(actor, pid)
        handle.connection = connection
        return handle

    def close(self) -> None:
        self.listener.close()


class _Rank(RankHandle):
    def __init__(self, actor: RankActor, pid: int) -> None:
        self._actor = actor
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    def died(self, seconds: float) -> str | None:
        return self._actor.died(seconds)

    def kill(self) -> None:
        assert self._actor.kill() is not None
