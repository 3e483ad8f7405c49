"""Logging of the two processes: lines for people, or one JSON object per line for log collectors."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from pegboard.toolkit.system.redact import redact

if TYPE_CHECKING:
    from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; everything else was given as `extra`."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: `time` (UTC), `level`, `process`, `logger`, `message`, the fields of its `extra`,
    and `exception` where there is one.

    A field whose name says that it is a secret is hidden, as in `/server_info`. What JSON does not know is written as
    text, and numbers it does not know as null: a line is always valid.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in line}
        line |= redact(extra)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack_info"] = record.stack_info
        return _encode(line)


def configure_logging(
    process: str, level: str, log_format: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> None:
    """Let the root logger of this process, `process` by name, write to `stream` (standard error by default).

    A logger that was set up before is left alone.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _encode(line: dict[str, object]) -> str:
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except Exception:
        # Keys that are no text, lone surrogates, or objects that cannot even be shown.
        return msgspec.json.encode({name: _plain(value) for name, value in line.items()}).decode()


def _plain(value: object) -> str:
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return f"<{type(value).__name__}>"
