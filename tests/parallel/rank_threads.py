"""Ranks as threads of this process: a launcher for tests, of a plugin that is installed nowhere."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.registry.registry import Registry
from pegboard.core.server.follower_process import Orders, follow
from pegboard.plugins.parallel.api import RankHandle, RankLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 60.0


class _Thread(RankHandle):
    def __init__(self, orders: Orders, connection: socket.socket) -> None:
        self.connection = connection
        self._orders = orders
        self._thread = threading.Thread(target=self._run, name="rank")
        self._thread.start()

    def _run(self) -> None:
        follow(self._orders, lambda: ResolvedConfig.from_json(self._orders.config, registry()))

    @property
    def pid(self) -> int:
        return os.getpid()

    def died(self, seconds: float) -> str | None:
        self._thread.join(seconds)
        return None if self._thread.is_alive() else "ended"

    def kill(self) -> None:
        """A thread ends by itself once its leader has closed the connection, or said so."""


class Threads(RankLauncher[NoOptions]):
    """Starts ranks as threads."""

    def __init__(self, options: NoOptions, ctx: Any) -> None:
        super().__init__(options, ctx)
        self._started: list[_Thread] = []

    def start(self, line: Callable[[int], bytes]) -> RankHandle:
        ours, theirs = socket.socketpair()
        self._started.append(_Thread(msgspec.json.decode(line(theirs.detach()), type=Orders), ours))
        return self._started[-1]

    def close(self) -> None:
        assert all(one.died(SECONDS) for one in self._started), "a rank goes on after its leader's end"


PLUGIN = Plugin(
    name="rank_threads",
    version="0.1.0",
    summary="ranks as threads",
    providers=(Provider("rank_launcher", "threads", "tests.parallel.rank_threads:Threads", "threads of this process"),),
)


def registry() -> Registry:
    """Return all that is installed, and the launcher."""
    return Registry.discover().with_plugins(PLUGIN, distribution="tests")


def in_threads(config: dict[str, Any], tensor: int, **parallel: Any) -> ResolvedConfig:
    """Return a config whose ranks are threads."""
    parallel |= {"tensor": tensor, "launch": {"use": "threads"}}
    data = {"runner": {"use": "layered"}, **config, "parallel": parallel}
    return compose(data=data, env={}, registry=registry())
