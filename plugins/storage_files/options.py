"""Options of the storage in files."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class FilesOptions(Options):
    """Options of `files`."""

    dir: str = ""
    """The folder. It is made where it does not exist, for this user alone. Servers that share it run as the same user,
    and trust each other. Empty: `kv` in the cache folder (`$PEGBOARD_CACHE`, else `~/.cache/pegboard`)."""

    max_bytes: int | None = Field(default=None, gt=0)
    """Most bytes that all blocks in the folder take together, those of other models too. null: 20 GB, but at most half
    of what is free at the start."""

    min_free: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the file system that stays free. Blocks go, the least recently used first, where less is free."""

    fsync: bool = False
    """Wait for the disk with each block. Without, a power cut may cost blocks that were just written; what it leaves of
    them is noticed and removed."""

    rescan: float = Field(default=600.0, gt=0)
    """Seconds after which a server that writes looks again at what other servers have written and removed."""
