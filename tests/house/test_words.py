"""The words that make readers stop: none in the pages that people meet first, and fewer and fewer elsewhere.

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
CLEAN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "docs/index.md",
    "Makefile",
)
LEFT = {"docs": 28, "core": 88, "plugins": 38, "conformance": 24, "tools": 14, "benchmarks": 4, "examples": 0}
"""How many lines of each folder still have one. Lower the number when you rewrite some; it never rises."""


def lines_with_riddles(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    return [f"{path.relative_to(ROOT)}: {line.strip()}" for line in text.splitlines() if RIDDLES.search(line)]


@pytest.mark.parametrize("name", CLEAN)
def test_first_pages_have_none(name: str) -> None:
    assert not lines_with_riddles(ROOT / name)


@pytest.mark.parametrize("folder", LEFT)
def test_they_become_fewer(folder: str) -> None:
    paths = [path for ending in ("*.py", "*.md", "*.h", "*.cpp", "*.tmpl") for path in (ROOT / folder).rglob(ending)]
    paths = [path for path in paths if path.name != "style.md" and path.parent.name != "reference"]
    found = [line for path in sorted(paths) for line in lines_with_riddles(path)]
    assert len(found) == LEFT[folder], "\n".join([f"{len(found)} lines, and {LEFT[folder]} are allowed:", *found[-20:]])


def test_it_finds_what_it_looks_for() -> None:
    for text in ("Nobody asks.", "for whoever comes", "It is no error.", "as reckoned"):
        assert RIDDLES.search(text)
    for text in ("no request asks", "there is no such thing", "is no longer here", "a recking"):
        assert not RIDDLES.search(text)
