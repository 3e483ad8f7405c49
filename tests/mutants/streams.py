"""A parser's stream around another one, for mutants that change what goes in or comes out."""

from __future__ import annotations

from typing import Any

from pegboard.toolkit.parsing.output_parser import ParserStream


class Around(ParserStream):
    """A stream around another one."""

    def __init__(self, inner: ParserStream) -> None:
        self.inner = inner

    def feed(self, text):
        return self.inner.feed(text)

    def finish(self):
        return self.inner.finish()


def around(stream: type[Around], parser: type[Any]) -> type[Any]:
    """Return a kind of `parser` that has this stream around its own."""

    class Wrapped(parser):  # type: ignore[misc]
        def stream(self, tools=(), *, prompt=""):
            return stream(super().stream(tools, prompt=prompt))

    Wrapped.__name__ = stream.__name__
    return Wrapped
