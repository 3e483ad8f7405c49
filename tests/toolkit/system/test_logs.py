"""Logs as JSON: every line is an object, whatever was logged."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from pegboard.toolkit.system.logs import JsonFormatter


def logged(message: str, *args: object, level: int = logging.INFO, **more: Any) -> dict[str, Any]:
    """What one call writes, read back."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("scheduler"))
    logger = logging.Logger("pegboard.test", logging.DEBUG)
    logger.addHandler(handler)
    logger.log(level, message, *args, **more)
    [line] = stream.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return found


def test_the_usual_fields() -> None:
    line = logged("%d requests\nfailed", 3, level=logging.WARNING)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "process": "scheduler",
        "logger": "pegboard.test",
        "message": "3 requests\nfailed",
    }


def test_extra_fields_keep_their_types() -> None:
    line = logged("x", extra={"rid": "r1", "queued": 7, "usage": 0.5, "tags": ["a"], "more": {"n": None}})
    assert (line["rid"], line["queued"], line["usage"], line["tags"], line["more"]) == (
        "r1",
        7,
        0.5,
        ["a"],
        {"n": None},
    )


def test_extra_fields_do_not_hide_the_usual_ones() -> None:
    assert logged("x", extra={"level": "none", "logger": "x", "time": "never"})["level"] == "info"


def test_exceptions_have_their_traceback() -> None:
    try:
        raise ValueError("what now")
    except ValueError:
        line = logged("it failed", exc_info=True)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: what now")


def test_secrets_are_hidden() -> None:
    line = logged("x", extra={"api_key": "s3cret", "options": {"hub_token": "s3cret"}, "new_tokens": 5})
    assert "s3cret" not in json.dumps(line)
    assert line["new_tokens"] == 5


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1, 2}, object(), {(1, 2): 3}, "\ud800", b"\xff", Unshowable(), 1 << 80]
)
def test_whatever_is_logged_is_one_valid_line(value: object) -> None:
    assert logged("still here", extra={"value": value})["message"] == "still here"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_both_formats_in_a_process(log_format: str) -> None:
    code = (
        "import logging; from pegboard.toolkit.system.logs import configure_logging as c;"
        f"c('api', 'info', {log_format!r}); logging.getLogger('a').info('hello', extra={{'rid': 'r'}});"
        "logging.getLogger('a').debug('quiet')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = done.stderr.splitlines()
    if log_format == "json":
        assert json.loads(line)["rid"] == "r"
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d api INFO hello", line)
