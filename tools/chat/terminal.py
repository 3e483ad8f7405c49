"""What ``pegboard chat`` reads from and writes to: a terminal, or pipes.

With pipes the answers alone go to standard output, as they are; everything else goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DIM, BOLD, PLAIN = "\033[2m", "\033[1m", "\033[0m"
HISTORY_LINES = 1000
FENCES = ("```", '"""', "'''")

_CONTROL: dict[int, int | str | None] = {
    **{code: 0x2400 + code for code in range(0x20)},
    **dict.fromkeys(range(128, 160), 65533),
    0x7F: 0x2421,
    ord("\r"): None,
    ord("\n"): "\n",
    ord("\t"): "\t",
}
"""A model's text must not steer the terminal: control characters are shown as pictures of themselves."""


class Terminal:
    """Reads what the user says, and shows what the model does."""

    def __init__(self, *, history: Path | None = None, commands: Sequence[str] = ()) -> None:
        """`history` keeps typed lines for later chats; `commands` are completed with the tab key. Both on terminals."""
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._colours = self.interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._history = history
        self._editing = False
        self._thinking = False
        self._fresh = True
        """Whether the cursor is at the beginning of a line."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):
                # An answer in characters that this terminal lacks is better than a traceback.
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        if self.interactive:
            self._set_up_editing(commands)

    # ---- in -------------------------------------------------------------------------------------------------------

    def read(self) -> str:
        """Return what the user says next: a line, several with a backslash at their ends, or what stands between two
        fences (lines of three quotes or backticks). Raises EOFError and KeyboardInterrupt.
        """
        line = self._line("> ")
        fence = line.strip()
        if fence in FENCES:
            return "\n".join(self._lines_until(fence))
        if fence.startswith("```") and not fence.endswith("```"):
            # A block of code, which keeps its fences: they are part of the message.
            return "\n".join([line, *self._lines_until("```"), "```"])
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            try:
                line = self._line(". ")
            except EOFError:
                line = ""
        return "\n".join([*lines, line])

    def _lines_until(self, fence: str) -> Iterator[str]:
        while True:
            try:
                line = self._line(". ")
            except EOFError:
                return
            if line.strip() == fence:
                return
            yield line

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.removesuffix("\n")
        self._end_line()
        if self._colours and self._editing:
            # readline must know what takes no room.
            prompt = f"\001{BOLD}\002{prompt}\001{PLAIN}\002"
        try:
            return input(prompt)
        except EOFError:
            self.note("")
            raise
        except KeyboardInterrupt:
            self.note("")
            raise

    def _set_up_editing(self, commands: Sequence[str]) -> None:
        try:
            import readline
        except ImportError:
            return
        self._editing = True

        def complete(text: str, state: int) -> str | None:
            found = [name for name in commands if name.startswith(text)] if text.startswith("/") else []
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" \t\n")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
        if self._history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._history)

    def close(self) -> None:
        """Keep what was typed, for the next chat."""
        if not self._editing or self._history is None:
            return
        import readline

        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            # For this user's eyes only, from the first byte on.
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)

    # ---- out ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """More of an answer."""
        if self._thinking:
            self._thinking = False
            self._show(PLAIN if self._colours else "")
            self._end_line()
            self._show("\n" if self._colours else "[answer]\n")
            text = text.lstrip("\n")
        self._text(text)

    def think(self, text: str) -> None:
        """More of what the model thinks before it answers: dimmed on a terminal, nothing in a pipe."""
        if not self.interactive:
            return
        if not self._thinking:
            self._thinking = True
            self._show(DIM if self._colours else "[thinking]\n")
        self._text(text)

    def end_answer(self) -> None:
        """End the answer, wherever it stopped."""
        if self._thinking:
            self._thinking = False
            self._show(PLAIN if self._colours else "")
        self._end_line()

    def note(self, text: str) -> None:
        """Write a line that is not the model's."""
        if self.interactive:
            self._end_line()
            self._show(f"{DIM}{text}{PLAIN}\n" if self._colours and text else f"{text}\n")
            self._fresh = True
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _text(self, text: str) -> None:
        if not text:
            return
        self._show(text.translate(_CONTROL) if self.interactive else text)
        self._fresh = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._fresh:
            self._show("\n")
            self._fresh = True

    @staticmethod
    def _show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
