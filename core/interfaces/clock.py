"""Clock: where the scheduler, its policies and its gates have the time from."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds: `time.monotonic` in an engine, virtual time in the policy lab. Scheduler, policies and gates ask
no other, so that a simulated run behaves as a real one."""
