"""What ends outputs: by a token (`Stage.finishers`), and by their text (`Stage.compile_stops`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.status import FinishReason


class TextMatcher(Protocol):
    """Finds what ends a text, one character at a time: `before`, then `read`, for each; after `restart`, `before`
    again.
    """

    @property
    def undecided(self) -> int:
        """How many of the latest characters might be the beginning of a match: they are not shown yet."""

    def before(self, char: str) -> tuple[int, str] | None:
        """Return the length of a match that ends before `char`, which is known now and not read, and what answers call
        it; None where there is none. A match has one character at least.
        """

    def read(self, char: str) -> tuple[int, str] | None:
        """Read `char`; as `before`, of a match that ends with it. The longest one, if there are several."""

    def restart(self) -> None:
        """Forget what has begun: a match was ignored, and none has part of its text."""


class CompiledStops(Protocol):
    """What ends outputs by their text, compiled: for all answers that have the same."""

    @property
    def steps(self) -> int:
        """What a character of one answer costs at worst, in steps of an automaton: about 1 microsecond each."""

    @property
    def chars(self) -> int:
        """Characters of what was compiled."""

    def matcher(self) -> TextMatcher:
        """Return a new one, at the beginning of a text."""


class Ending(Protocol):
    """One reason to end, of one request."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        """Return why the request ends with `token`, the newest of its output; None where it goes on."""
