"""Python's own parser of regular expressions, which is private: all of its internals that this project uses.

Python may change them in any minor release. tests/plugins/stop_expressions/test_re_internals.py states what
is relied on, and has to pass with each Python that the project supports.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, TypeAlias

constants: Any = _constants
"""The names of what a parsed pattern consists of, such as `LITERAL` and `MAX_REPEAT`."""

Name: TypeAlias = int
"""One of `constants`: they are numbers with names."""

Element: TypeAlias = tuple[Name, Any]
"""One element of a parsed pattern: its name, and arguments whose form depends on the name."""


def parse(pattern: str) -> Any:
    """Parse a pattern as a sequence of (name, arguments), with its flags in `state.flags`.

    Raises re.error, OverflowError, RecursionError, or a Warning that is an error, for what `re` would not take.
    """
    return _parser.parse(pattern, 0)


def matcher_of(op: Name, av: Any, flags: int) -> Callable[[str], re.Match[str] | None]:
    """Return the `fullmatch` of a pattern that consists of this one element."""
    state = _parser.State()
    state.flags = flags
    compiled: re.Pattern[str] = _compiler.compile(_parser.SubPattern(state, [(op, av)]))
    return compiled.fullmatch
