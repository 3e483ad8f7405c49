"""What a life-cycle hook may do with the scheduler that it was called in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.prefix_cache import PrefixCache


class Later(Protocol):
    """The answer of a control action that takes longer than there is time between two steps."""

    def poll(self) -> dict[str, object] | None:
        """Once per turn: go on for a short time. Return the answer, None for not yet; raise as the action does."""


Answer: TypeAlias = "dict[str, object] | Later"
Control = Callable[[dict[str, object]], Answer]
"""A control action: plain values in and out, or an answer later. Runs between two steps. Raises InvalidRequest."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of the requests that are there when the scheduler is paused."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One that takes part: its plugin, and the class that does."""

    plugin: str
    name: str


@dataclass(frozen=True, slots=True)
class ShownPoint:
    """A point of hooks or stages with those who take part, in the order in which they are called."""

    point: str
    process: str
    when: str
    cost: str
    listeners: tuple[Listener, ...]


class EngineView(Protocol):
    """The scheduler as plugins see it in `engine_started`. Call it between two steps, as in a control action."""

    def stats(self) -> dict[str, Any]:
        """Counters, queues, memory and timings, as plain values; the same as `EngineClient.server_info` shows."""

    @property
    def prefix_cache(self) -> PrefixCache[Options]:
        """The scheduler's prefix cache, to be asked and not changed."""

    def points(self) -> Sequence[ShownPoint]:
        """Return who takes part at the hooks of all plugins, and in the methods of `Stage`."""

    def add_control(self, action: str, run: Control) -> None:
        """Let `EngineClient.control(action, ...)` call `run`. A third party's actions start with its name and a dot;
        plain names are those that the API plugins know.

        Raises PluginError where the action is taken.
        """

    def call_hook(self, name: str, **arguments: object) -> list[object]:
        """Call a life-cycle hook of all plugins, so that a plugin may define the occasion (`register_metrics`)."""

    def pause(self, mode: PauseMode, by: str = "") -> None:
        """Start no more steps until all who have paused `resume`, a plugin `by` its name. New requests are accepted and
        wait; control actions and aborts work.

        `abort` ends all requests, `in_place` leaves them as they are, `retract` puts the running ones back into the
        queue with their output kept, so that their memory is free. If paused already, only the mode is applied.
        """

    def resume(self, by: str = "") -> bool:
        """Start steps again, unless others have paused, too. Return whether this one had."""

    def settle(self) -> None:
        """Take the results of what is under way; what needs more launches is given up, and its requests wait again."""

    def drop_prefixes(self) -> None:
        """Drop all cached prefixes, or those that no request uses."""

    def set_on_step(self, call: Callable[[], None] | None) -> None:
        """Call this after every step, instead of what was set before; None: nothing. Exceptions end the scheduler."""
