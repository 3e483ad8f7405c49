"""A follower's process: ``python -m pegboard.core.server.follower_process``, started by the scheduler's process.

Its orders come as one line of JSON on standard input, as those of the scheduler's process do, and it ends when that
closes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegboard.toolkit.system.lazy_names import import_name
from pegboard.toolkit.system.logs import configure_logging
from pegboard.toolkit.system.threads import yield_when_waiting

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.interfaces.followers import FollowerModel


class Orders(msgspec.Struct):
    """What the process is told at its start: see `FollowersContext.order`."""

    config: str
    entry: str
    about: str
    scratch: str


def follow(orders: Orders, composed: Callable[[], ResolvedConfig]) -> None:
    """Follow as these orders say, with the config that they have, until the leader ends it. What raises when the config
    is `composed` is told to the leader.
    """
    from pegboard.core.engine.following import FollowingModel

    entry: Callable[[str, FollowerModel], None] = import_name(orders.entry)
    entry(orders.about, FollowingModel(composed, Path(orders.scratch)))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    threading.Thread(target=_die_with_leader, name="leader-watch", daemon=True).start()
    yield_when_waiting()
    follow(orders, partial(_composed, orders))
    return 0


def _composed(orders: Orders) -> ResolvedConfig:
    from pegboard.core.config.compose import ResolvedConfig

    resolved = ResolvedConfig.from_json(orders.config)
    configure_logging("follower", resolved.engine.log_level, resolved.engine.log_format)
    return resolved


def _die_with_leader() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
