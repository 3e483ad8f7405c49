"""The page on clients lists those that are tested, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.test_third_party_clients import EXPECTED, HARNESS
from tests.e2e.third_party_clients.install import NODE, PYTHON, names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text("utf-8")
ELSEWHERE = {"sglang-router": "tests/e2e/test_router.py"}
"""Groups with a test file of their own."""


def test_the_list_is_that_of_the_tests() -> None:
    listed = re.findall(r"^\| `([^`]+)` \| \d+\.\d+\.\d+ \| \S", PAGE, re.MULTILINE)
    tested = [name for clients in (PYTHON | NODE).values() for name in names(clients)]
    assert sorted(listed) == sorted(tested)
    assert set(EXPECTED | HARNESS | ELSEWHERE) == set(PYTHON | NODE)


def test_files_that_are_named_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", PAGE)) | set(ELSEWHERE.values())
    assert len(named) >= 3
    assert not [one for one in named if not (ROOT / one).exists()]
    assert re.search(r"^clients:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
