"""The key of the config that operators' controls add."""

from __future__ import annotations

from pegboard.core.interfaces.options import SectionFields


class LogFields(SectionFields):
    """Keys at the top level."""

    log_requests: bool = False
    """Log a line per finished request, with its times, lengths and reason, but never its text."""
