"""What a life-cycle hook may do with the scheduler that it was called in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Control = Callable[[dict[str, object]], dict[str, object]]
"""A control action: plain arguments in, plain values out. Runs between two steps, so it must be short. Raises
InvalidRequest for arguments that are wrong."""


class EngineView(Protocol):
    """The scheduler as plugins see it in `engine_started`."""

    def stats(self) -> dict[str, Any]:
        """Counters, queues, memory and timings, as plain values; the same as `EngineClient.server_info` shows."""

    def add_control(self, action: str, run: Control) -> None:
        """Let `EngineClient.control(action, ...)` call `run`. A plugin's actions start with its name and a dot.

        Raises PluginError where the action is taken.
        """

    def call_hook(self, name: str, **arguments: object) -> list[object]:
        """Call a life-cycle hook of all plugins, so that a plugin may define the occasion (`register_metrics`)."""
