"""For the suite of ApiRouter: a text of its own for every request, answers read by their content types, and what is
wrong with a text that arrived.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.conformance.fake_client import prompt_text
from pegboard.core.interfaces.client import GenerateRequest

LINES = (
    *("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"),
    *("application/json-lines", "application/stream+json", "application/json-seq"),
)
"""Content types of streams whose lines are JSON."""

STREAMS = ("text/event-stream", *LINES)

CALLER = "(caller {})"
_CALLER = re.compile(r"\(caller (\d+)\)")
_MARK = re.compile(r"~(\d+)([a-d])~")
_SHOWN = 60


def pieces_of(number: int) -> tuple[str, ...]:
    """Return the answer to the request of this number: what JSON, events and lines trip over, and marks that are its
    own.

    One piece is empty and one comes twice, as with real engines; the last one has text and the finish reason.
    """
    return (
        f'~{number}a~ "Quoted", ',
        f"it's ~{number}b~\n\nnew\r\nlines\tand \\n back\\slashes",
        "",
        " ha",
        " ha",
        f' ~{number}c~ {{braces}} {{"a": [1]}} \u2028 \u00e9\U0001f600',
        f" ~{number}d~ end",
    )


def mark(number: int) -> bytes:
    """Return what stands in the first piece, however it is encoded."""
    return f"~{number}a~".encode()


def own_script(request: GenerateRequest, number: int) -> Sequence[str]:
    """Return the script of a fake client in which a prompt that names its caller gets the caller's text, and another
    one that of its number.
    """
    found = _CALLER.findall(prompt_text(request.prompt))
    return pieces_of(int(found[-1]) if found else number)


@dataclass(frozen=True)
class Event:
    """One event or line, or a whole answer: its JSON, or its text where it is none. `name` is an event's name."""

    data: Any
    name: str = ""


class Unreadable(ValueError):
    """An answer that is not what its content type says."""


def is_stream(content_type: str) -> bool:
    """Return whether answers of this type come in events or lines."""
    return content_type.partition(";")[0].strip().lower() in STREAMS


def read_events(content_type: str, body: bytes) -> list[Event]:
    """Return the events, lines, or the one answer, by content type. Raises Unreadable."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8: {error}") from None
    if kind == "text/event-stream":
        return list(_server_sent(text))
    if kind in LINES:
        # By line feeds alone: other line breaks may stand in JSON's strings.
        lines = [one.strip("\x1e\r ") for one in text.split("\n")]
        return [Event(_json(one, f"line {number}")) for number, one in enumerate(lines, 1) if one]
    if kind == "application/json":
        data = _json(text, "the answer")
        return [Event(one) for one in data] if isinstance(data, list) else [Event(data)]
    if kind.startswith("text/"):
        return [Event(text)]
    raise Unreadable(
        f"the suite cannot read {kind or 'an answer without a content type'}; it knows {', '.join(STREAMS)}, "
        "application/json and text. A test class reads others with its own `read(exchange)`"
    )


def _server_sent(text: str) -> Iterator[Event]:
    name, data = "", list[str]()
    *lines, rest = re.split("\r\n|\n|\r", text)
    for number, line in enumerate(lines, 1):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield Event(_event_data("\n".join(data), number), name)
            name, data = "", []
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field not in ("", "id", "retry"):
            raise Unreadable(f"line {number} of the events, {line[:_SHOWN]!r}, is not a field of an event; {_BY_HAND}")
    if data or rest:
        raise Unreadable("the last event does not end in an empty line, so clients do not see it")


_BY_HAND = "was it put together by hand? `event`, `line` and `json_response` of the toolkit escape what JSON must"


def _event_data(text: str, number: int) -> Any:
    return (
        _json(text, f"the event before line {number}") if text[:1] in ("{", '"') or text[:2] in ("[{", '["') else text
    )


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreadable(f"{what} is not JSON, {text[:_SHOWN]!r}: {error}; {_BY_HAND}") from None


def all_texts(events: Sequence[Event]) -> list[str]:
    """Return every text that events may be meant to spell: the strings at one place of events of one kind, put
    together, or the last one where each goes on from the one before. Of a single answer, its strings.
    """
    places: dict[tuple[Any, ...], list[str]] = {}
    for one in events:
        kind = one.data.get("type") if isinstance(one.data, dict) else None
        for path, text in _strings(one.data):
            places.setdefault((one.name, kind if isinstance(kind, str) else "", *path), []).append(text)
    return [_spelled([text for text in found if text]) for found in places.values()]


def _spelled(found: Sequence[str]) -> str:
    pairs = itertools.pairwise(found)
    return found[-1] if found and all(later.startswith(text) for text, later in pairs) else "".join(found)


def _strings(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _strings(value, (*path, key))


def numbers_in(texts: Sequence[str]) -> set[int]:
    """Of which requests texts have pieces."""
    return {int(number) for text in texts for number, _ in _MARK.findall(text)}


def wrong_with(texts: Sequence[str], number: int) -> str:
    """Return what is wrong with the texts of the answer to the request of this number; "" where nothing is.

    One must be the request's text, and none may have a part of it or anything of another one's.
    """
    wanted = "".join(pieces_of(number))
    carrying = [text for text in texts if _MARK.search(text)]
    bad = [
        text for text in carrying if text.replace(wanted, "", 1) == text or _MARK.search(text.replace(wanted, "", 1))
    ]
    if wanted in texts and not bad:
        return ""
    if not carrying:
        return "the text is missing: none of its strings has a piece of it"
    return _difference(max(bad or carrying, key=len), wanted, number)


def _difference(text: str, wanted: str, number: int) -> str:
    found = _MARK.findall(text)
    others = sorted({int(one) for one, _ in found} - {number})
    letters = [letter for one, letter in found if int(one) == number]
    if others:
        return f"mixed up: it has text of another client's request ({others}, not {number}); keep nothing in the router"
    if len(set(letters)) < len(letters) or text.count(" ha") > 2:
        return f"a piece comes twice: {text!r}"
    if letters != sorted(letters):
        return f"pieces are out of order: {text!r}"
    if "d" not in letters:
        return f"the last chunk's text is lost, which comes with the finish reason: {text!r}"
    if letters != list("abcd") or text.count(" ha") < 2:
        return f"a piece is lost, one that is equal to the one before or that follows an empty one maybe: {text!r}"
    at = next((i for i, (one, two) in enumerate(zip(text, wanted, strict=False)) if one != two), len(wanted))
    return (
        f"characters are changed at {at}: {text[at : at + 20]!r} instead of {wanted[at : at + 20]!r} in {text!r}. "
        "Where this API writes texts in another way, the test class says how: `texts(events)`"
    )
