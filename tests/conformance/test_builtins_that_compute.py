"""Every built-in provider that adds in torch passes its contract's suite. tests/numeric.py has other orders of sums."""

from __future__ import annotations

from tests.conformance.builtins import classes

globals().update(classes(__name__, compute=True))
