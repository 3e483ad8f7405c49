"""The scheduler process: ``python -m pegboard.core.server.scheduler_process``, started by the API process alone.

Its orders come as one line of JSON on standard input (a config may hold secrets, and arguments are public). The pipe
stays open as long as the API process lives: when it closes, so does this process. Signals of the terminal or of a
service manager reach the whole group; they are the API process's affair, which drains first.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.core.interfaces.messages import (
    AbortRequest,
    FromScheduler,
    Ready,
    Shutdown,
    StartFailed,
    TokenOutput,
    ToScheduler,
)
from pegboard.toolkit.system.last_words import keep_last_words
from pegboard.toolkit.system.lazy_names import import_name
from pegboard.toolkit.system.logs import configure_logging
from pegboard.toolkit.system.progress import Bar, LogLines, shown_by
from pegboard.toolkit.system.scratch import remove_directory
from pegboard.toolkit.system.threads import yield_when_waiting
from pegboard.toolkit.system.watchdog import Watchdog
from pegboard.toolkit.system.wire import SchedulerWire, last_words_of, remove_endpoint

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.engine.build import BuiltScheduler

logger = logging.getLogger(__name__)

BUILDER = "pegboard.core.engine.build:build_scheduler"


RESTING_MS = 2
"""How long the loop waits for messages while all requests are held back by gates, which are asked again then."""


BUSY_MS = 10
"""The same while there are no requests, and the prefix cache still moves pages."""

MAX_QUEUED_REQUESTS = 2048
MAX_QUEUED_FILLS = 16
"""What may wait in a server whose config does not say: requests, and tokens that fill KV memory so many times."""


class Orders(msgspec.Struct):
    """What the process is told at its start. `config` is `ResolvedConfig.to_json()`; `builder` a lazy name; `scratch` a
    folder that it shares with the API's process.
    """

    address: str
    config: str
    builder: str = BUILDER
    scratch: str = ""


class Steppable(Protocol):
    """What the loop asks of a scheduler."""

    @property
    def idle(self) -> bool: ...

    @property
    def resting(self) -> bool: ...

    @property
    def busy(self) -> bool: ...

    def receive(self, messages: list[ToScheduler]) -> list[FromScheduler]: ...

    def step(self) -> list[TokenOutput]: ...


def run(wire: SchedulerWire, scheduler: Steppable, watchdog: Watchdog) -> None:
    """Messages in, one step, outputs out, until Shutdown comes. Sleeps in poll while there is nothing to do."""
    wait: int | None = None
    while True:
        if wait != 0:
            watchdog.rest()
        messages = wire.receive(wait)
        if any(isinstance(message, Shutdown) for message in messages):
            return
        watchdog.step_begins()
        wire.send(scheduler.receive(messages))
        outputs = scheduler.step()
        if outputs:
            for rid in wire.send_outputs(outputs):
                logger.error("the output of %r fits into no message; the request was aborted", rid)
                wire.send(scheduler.receive([AbortRequest(rid=rid)]))
        if scheduler.idle:
            wait = BUSY_MS if scheduler.busy else None
        else:
            wait = RESTING_MS if scheduler.resting else 0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    threading.Thread(target=_die_with_parent, args=(orders,), name="parent-watch", daemon=True).start()
    keep_last_words(last_words_of(orders.address))
    wire = SchedulerWire(orders.address)
    try:
        return _serve(orders, wire)
    finally:
        wire.close()


def _serve(orders: Orders, wire: SchedulerWire) -> int:
    try:
        from pegboard.core.config.compose import ResolvedConfig

        resolved = ResolvedConfig.from_json(orders.config)
        configure_logging("scheduler", resolved.engine.log_level, resolved.engine.log_format)
        yield_when_waiting()
        builder: Callable[[ResolvedConfig, Path], BuiltScheduler] = import_name(orders.builder)
        bars = resolved.engine.log_format == "text" and sys.stderr.isatty()
        with shown_by(Bar if bars else LogLines):
            built = builder(resolved, Path(orders.scratch))
        bounds = built.scheduler.bounds
        bounds.set_open(MAX_QUEUED_REQUESTS, MAX_QUEUED_FILLS)
        info = replace(built.info, most_requests=bounds.most_requests, most_tokens=bounds.most_tokens)
        built.prepare_memory(resolved.engine.memory.prepare_seconds)
        built.hooks.call.engine_started(info=info, engine=built.view)
    except PegboardError as error:
        wire.send([StartFailed(message=str(error), temporary=isinstance(error, Temporary))])
        return 1
    except Exception as error:
        logger.exception("the scheduler could not start")
        wire.send([StartFailed(message=f"the scheduler could not start: {type(error).__name__}: {error}")])
        return 1
    gc.collect()
    gc.freeze()
    wire.send([Ready(info=asdict(info), directory=str(built.directory))])
    run(wire, built.scheduler, Watchdog(resolved.engine.scheduler.watchdog_timeout))
    built.hooks.call.shutdown()
    built.close()
    return 0


def _die_with_parent(orders: Orders) -> None:
    # Not through sys.stdin: its lock would be held at the interpreter's end.
    while os.read(0, 4096):
        pass
    # A process that was killed leaves its socket's directory behind, and its scratch folder.
    remove_endpoint(orders.address)
    remove_directory(Path(orders.scratch))
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
