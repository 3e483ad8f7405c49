"""What clients can make the log say, and how often."""

from __future__ import annotations

import logging

import pytest

from pegboard.toolkit.system.log_lines import LimitedLog, quoted


def test_so_many_lines_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitedLog(logging.getLogger("x"), most=2, seconds=60.0, clock=lambda: now)
    for number in range(5):
        log.log(logging.WARNING, "line %d", number)
    now = 61.0
    log.log(logging.WARNING, "line %d of %s", 5, "it")
    log.log(logging.WARNING, "line 6")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["line 0", "line 1", "line 5 of it (3 more of these were not logged)", "line 6"]


@pytest.mark.parametrize("text", ["a\r\nb", "\x1b[2J", "\u2028\u202e", "\ud800", "x" * 10_000, "'\""])
def test_what_a_client_chose_stays_on_its_line(text: str) -> None:
    assert quoted(text).isprintable()
    assert quoted(text)[0] == quoted(text)[-1]
    assert len(quoted(text)) < 200
