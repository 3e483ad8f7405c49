"""The cache directory."""

from __future__ import annotations

import os
from pathlib import Path

from pegboard.core.interfaces.errors import PegboardError


def default_cache_dir() -> Path:
    """$PEGBOARD_CACHE, else $XDG_CACHE_HOME/pegboard, else ~/.cache/pegboard. Not created here.

    Raises PegboardError where it begins with a home folder that is not known.
    """
    if explicit := os.environ.get("PEGBOARD_CACHE"):
        return cache_path(explicit)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return cache_path(xdg) / "pegboard"
    return cache_path("~/.cache/pegboard")


def cache_path(text: str) -> Path:
    """Return the path, with a home folder for "~". Raises PegboardError where that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise PegboardError(f"the cache folder {text}: {error}; set PEGBOARD_CACHE or model.cache_dir") from error
