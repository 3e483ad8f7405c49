"""The control actions with which the API process asks the scheduler's."""

from __future__ import annotations

LOOK = "console.look"
RUNS = "console.runs"
POINTS = "console.points"

MOST_RUNS = 200
"""Runs of cached tokens that are shown."""
