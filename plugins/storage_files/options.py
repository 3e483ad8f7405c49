"""Options of the storage in files."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class FilesOptions(Options):
    """Options of `files`."""

    dir: str = ""
    """The directory. If it does not exist, it is created for this user only. Servers that share it must run as the same
    user, and trust each other. Empty: `kv` in the cache directory (`$PEGBOARD_CACHE`, else `~/.cache/pegboard`)."""

    max_bytes: int | None = Field(default=None, gt=0)
    """Maximum size of all blocks in the directory, including those of other models, in bytes. null: 20 GB, but at most
    half of what is free at the start."""

    min_free: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the file system that stays free. If less is free, the least recently used blocks are removed."""

    fsync: bool = False
    """Wait for the disk with each block. Without it a power cut may damage blocks that were just written; these are
    detected and removed."""

    rescan: float = Field(default=600.0, gt=0)
    """Seconds after which a server that writes checks again what other servers have written and removed."""
