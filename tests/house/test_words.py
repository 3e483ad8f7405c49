"""The words that make readers stop stand nowhere but in tests.

docs/style.md says what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIDDLES = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anybody|reckon(?:s|ed)?)\b|(?<!here )\bis no (?!longer|more|such)", re.I
)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "Makefile",
)
FOLDERS = ("docs", "core", "toolkit", "plugins", "conformance", "tools", "benchmarks", "examples")


def lines_with_riddles(path: Path) -> list[str]:
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    found = [(number, RIDDLES.search(line)) for number, line in lines]
    return [f"{path.relative_to(ROOT)}:{number}: {one.group()!r}" for number, one in found if one]


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_none(name: str) -> None:
    assert not lines_with_riddles(ROOT / name), "docs/style.md says what to write instead"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_have_none(folder: str) -> None:
    paths = [
        path
        for ending in ("*.py", "*.md", "*.h", "*.cpp", "*.tmpl", "*.yaml")
        for path in (ROOT / folder).rglob(ending)
    ]
    paths = [path for path in paths if path.name != "style.md" and path.parent.name != "reference"]
    found = [line for path in sorted(paths) for line in lines_with_riddles(path)]
    assert not found, "docs/style.md says what to write instead"


def test_it_finds_what_it_looks_for() -> None:
    for text in ("Nobody asks.", "for whoever comes", "It is no error.", "as reckoned"):
        assert RIDDLES.search(text)
    for text in ("no request asks", "there is no such thing", "is no longer here", "a recking"):
        assert not RIDDLES.search(text)
