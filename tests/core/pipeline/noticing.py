"""Whether a game notices a broken part of the product, for what that part does and not for an error of the mutant."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable

import pytest


def noticed(change: Callable[..., object], play: Callable[[], object]) -> bool:
    """Return whether a game fails with a change of the product. Fails where the change itself is what raises: where the
    last frame of the error lies within its own lines.
    """
    try:
        play()
    except (Exception, pytest.fail.Exception) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        lines, start = inspect.getsourcelines(change)
        own = last.filename == inspect.getsourcefile(change) and start <= (last.lineno or 0) < start + len(lines)
        if own:
            raise AssertionError(f"the mutant raises {error!r} itself, in {last.name}") from error
        return True
    return False
