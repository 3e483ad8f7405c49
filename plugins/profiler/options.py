"""The key of the config that the profiler adds."""

from __future__ import annotations

from pegboard.core.interfaces.options import SectionFields


class ProfilerFields(SectionFields):
    """Keys of `server`."""

    profile_dir: str | None = None
    """Directory below which `/start_profile` writes traces. Unset: no traces."""
