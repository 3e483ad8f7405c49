"""Clock: where the scheduler, its policies and its gates have the time from."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds, virtual ones in the policy lab. Scheduler, policies and gates ask no other clock."""
