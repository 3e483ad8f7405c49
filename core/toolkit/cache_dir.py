"""Where Pegboard keeps what it computes once."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$PEGBOARD_CACHE, else $XDG_CACHE_HOME/pegboard, else ~/.cache/pegboard. Not created here."""
    if explicit := os.environ.get("PEGBOARD_CACHE"):
        return Path(explicit).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "pegboard"
    return Path.home() / ".cache" / "pegboard"
