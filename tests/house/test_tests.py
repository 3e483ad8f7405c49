"""The tests test what is public, and say what the type checker must overlook; fewer and fewer do otherwise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
IGNORE = re.compile(r"# type: ignore\b")
POKES = 143
"""Private names of others that tests use. Lower it when you rewrite some; it never rises."""
IGNORES = 385
"""Lines of tests that the type checker must overlook, fakes above all. The same."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def pokes(tree: ast.AST) -> Iterator[str]:
    """Yield private names that a module takes from elsewhere: imported, or read from anything but its own instance."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not (isinstance(value, ast.Name) and value.id in ("self", "cls", "super")):
                yield node.attr


def texts() -> list[str]:
    return [path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]


def test_fewer_use_private_names() -> None:
    assert sum(1 for text in texts() for _ in pokes(ast.parse(text))) <= POKES


def test_fewer_are_overlooked() -> None:
    assert sum(len(IGNORE.findall(text)) for text in texts()) <= IGNORES


def test_pokes_are_found() -> None:
    source = "from a import _b\nc._d\nself._e\nsuper()._f\nc().__g__\nc()._h"
    assert list(pokes(ast.parse(source))) == ["_b", "_d", "_h"]
