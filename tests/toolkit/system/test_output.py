"""What commands print where standard output cannot say every character."""

from __future__ import annotations

import io
import json
import sys

import pytest

from pegboard.toolkit.system.output import write, write_json


def printed(encoding: str, monkeypatch: pytest.MonkeyPatch, value: object) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    if isinstance(value, str):
        write(value)
    else:
        write_json(value)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "caf? ? 1\n"), ("latin-1", "caf\u00e9 ? 1\n"), ("utf-8", "caf\u00e9 \u20ac 1\n")],
)
def test_a_text_is_said_with_replacements(encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(encoding, monkeypatch, "caf\u00e9 \u20ac 1") == shown


def test_half_a_character_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("utf-8", monkeypatch, "a\ud800b") == "a?b\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_stays_the_same_value(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"text": "caf\u00e9 \u20ac", "ids": [1]}
    assert json.loads(printed(encoding, monkeypatch, value)) == value
