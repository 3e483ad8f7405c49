"""The key of the config that the profiler adds."""

from __future__ import annotations

from pegboard.core.interfaces.options import SectionFields


class ProfilerFields(SectionFields):
    """Keys of `server`."""

    profile_dir: str | None = None
    """Directory below which traces of `/start_profile` are written; unset: none are made."""
