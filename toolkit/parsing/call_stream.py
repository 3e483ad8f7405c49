"""For tool parsers: the base of streams that read calls, and calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pegboard.toolkit.parsing.json_stream import as_object, ignore, read_string, read_value
from pegboard.toolkit.parsing.output_parser import ToolFunction
from pegboard.toolkit.parsing.text_stream import Broken, Reading, TextStream

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ARGUMENTS = ("arguments", "parameters")
_ASIDES = ("id", "type")


@dataclass(slots=True)
class _Call:
    """What is known of a call that is being read. `arguments` are JSON text, "" until they are there."""

    name: str = ""
    arguments: str = ""
    told: bool = False
    unknown: bool = False
    """Whether there is no such function. Of several calls that one is content, and the others are calls."""


class CallStream(TextStream):
    """A stream that reads calls of these functions, or of any where there are none."""

    def __init__(self, tools: Sequence[ToolFunction] = ()) -> None:
        super().__init__()
        self.names = frozenset(one["name"] for one in tools)
        self._unknown: list[str] = []
        """Calls of unknown functions, which are content if another call follows; until then they are recorded, too."""

    def start(self, name: str, call_id: str = "") -> None:
        """Begin a call, and tell what was read of it so far. Raises Broken where there is no such function."""
        self.check(name)
        self.source.stop_record()
        for text in self._unknown:
            self.sink.line(text)
        self._unknown.clear()
        self.sink.start(name, call_id)

    def check(self, name: str) -> None:
        """Raise Broken where there is no function of this name."""
        if not self.knows(name):
            raise Broken

    def knows(self, name: str) -> bool:
        """Return whether there is a function of this name."""
        return name in self.names or (not self.names and _NAME.fullmatch(name) is not None)

    def leave_out_marker(self) -> None:
        """Leave out the marker that was just read, and the white space before it."""
        self.source.stop_record()
        self.sink.drop_space()

    def attempt(self, reading: Reading[object], end: str = "") -> Reading[bool]:
        """Read what may turn out to be no call; True where there was one.

        What does not fit becomes content, or, where it is in the middle of a call that has been told of, everything as
        far as `end` ("": the end of the text) its arguments; `end` is not read.
        """
        before = self.sink.calls
        try:
            yield from reading
            self.source.stop_record()
        except Broken:
            self._unknown.clear()
            if self.sink.in_call:
                found = yield from self.until(self.sink.arguments, *filter(None, [end]))
                self.source.put_back(found)
                self.source.stop_record()
                self.sink.end()
            else:
                self.give_back()
        return self.sink.calls > before

    def read_object(self, name: str, call_id: str = "") -> Reading[None]:
        """Read a call's arguments, which are a JSON object that is told as it comes."""
        if (yield from self.source.peek()) != "{":
            raise Broken
        self.start(name, call_id)
        yield from read_value(self.source, self.sink.arguments)
        self.sink.end()

    def tell_whole(self, name: str, arguments: str) -> None:
        """Tell a call that is there all at once."""
        self.start(name)
        self.sink.arguments(arguments)
        self.sink.end()

    def read_call(self, *, strict: bool = False, several: bool = False) -> Reading[bool]:
        """Read a call such as ``{"name": "f", "arguments": {"a": 1}}``. `strict` takes no other keys, for text that is
        only by its keys known to be a call. Arguments that come before the name are told with it. One of `several` may
        be of an unknown function: False where it is.
        """
        source, call = self.source, _Call()
        yield from source.expect("{")
        while True:
            yield from source.skip_space()
            key = yield from read_string(source)
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            yield from self._read_field(call, key, strict=strict, several=several)
            yield from source.skip_space()
            if (yield from source.peek()) != ",":
                break
            source.take(1)
        if (yield from source.peek()) != "}" or (strict and not (call.told or call.arguments)):
            raise Broken
        if not call.unknown:
            self.check(call.name)
        source.take(1)
        if not call.told and not call.unknown:
            self.tell_whole(call.name, call.arguments or "{}")
        return not call.unknown

    def _read_field(self, call: _Call, key: str, *, strict: bool, several: bool) -> Reading[None]:
        """Read the value of one key, and tell the call as soon as it has both name and arguments."""
        if key == "name" and not call.name:
            call.name = yield from read_string(self.source)
            call.unknown = several and not self.knows(call.name)
            if not call.unknown:
                self.check(call.name)
        elif key in _ARGUMENTS and not (call.arguments or call.told):
            if call.name and not call.unknown and (yield from self.source.peek()) == "{":
                yield from self.read_object(call.name)
                call.told = True
                return
            call.arguments = yield from self._read_arguments()
        elif strict and key not in _ASIDES:
            raise Broken
        else:
            yield from read_value(self.source, ignore)
        if call.name and call.arguments and not (call.told or call.unknown):
            self.tell_whole(call.name, call.arguments)
            call.told = True

    def _read_arguments(self) -> Reading[str]:
        """Read arguments that cannot be told yet, or stand there in a form of their own: as a string, or as null."""
        pieces: list[str] = []
        char = yield from self.source.peek()
        if char == '"':
            return as_object((yield from read_string(self.source)) or "{}")
        yield from read_value(self.source, pieces.append)
        text = "".join(pieces)
        if char != "{" and text != "null":
            raise Broken
        return text if char == "{" else "{}"

    def read_calls(self) -> Reading[None]:
        """Read a list of calls, ``[{...}, {...}]``."""
        yield from self.source.expect("[")
        yield from self.source.skip_space()
        yield from self.read_several(lambda: self.read_call(several=True), self.goes_on)

    def goes_on(self) -> Reading[bool]:
        """Read what stands after an item of a list. False for its end, before which a comma may stand."""
        source = self.source
        yield from source.skip_space()
        if (yield from source.peek()) == ",":
            source.take(1)
            yield from source.skip_space()
            if (yield from source.peek()) != "]":
                return True
        yield from source.expect("]")
        return False

    def read_several(self, call: Callable[[], Reading[bool]], goes_on: Callable[[], Reading[bool]]) -> Reading[None]:
        """Read calls that stand together: `call` reads one, and returns whether its function is known; `goes_on` reads
        what is between two, and returns whether there is another. Calls of unknown functions become content, each on a
        line of its own; where there are no others, Broken is raised, so that all of the text does.
        """
        before = self.sink.calls
        while True:
            mark = self.source.mark
            if (yield from call()):
                self.source.start_record()
            elif self.sink.calls == before:
                self._unknown.append(self.source.recorded(mark))
            else:
                self.sink.line(self.source.recorded(mark))
                self.source.start_record()
            if not (yield from goes_on()):
                break
        if self.sink.calls == before:
            raise Broken
