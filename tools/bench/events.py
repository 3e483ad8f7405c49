"""Server-sent events out of the bytes of a stream, however these are cut."""

from __future__ import annotations

from collections.abc import Iterator

_FIELD = b"data: "


class EventSplitter:
    """Yields the data of each event once its empty line is there. Names, ids and comments are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the events that these bytes complete."""
        if not self._rest and data.startswith(_FIELD) and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            # One whole event: what nearly every server sends at a time.
            text = data[len(_FIELD) : -2]
            if b"\n" not in text:
                yield text
                return
        data = self._rest + data
        if b"\r" in data:
            data = _plain(data)
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            text = b"\n".join(line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
            if text:
                yield text

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return self._rest.strip()


def _plain(data: bytes) -> bytes:
    """End lines with LF that end with CR LF or CR. A CR at the end is left: an LF may follow."""
    last = b"\r" if data.endswith(b"\r") else b""
    data = data[: len(data) - len(last)]
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + last
