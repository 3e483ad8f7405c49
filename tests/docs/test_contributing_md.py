"""CONTRIBUTING.md names every file that knows a sampling field."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## Add a sampling field$(.*?)^## ", re.MULTILINE | re.DOTALL)
FOLDERS = ("core", "toolkit", "plugins", "conformance")
TABLES = ("docs/sampling.md", "docs/openai.md", "docs/anthropic.md", "tests/plugins/field_tables.py")


def knows(path: Path, field: re.Pattern[str]) -> bool:
    """Whether a file's code knows the field: its name stands outside of comments and docstrings."""
    text = path.read_text()
    if not field.search(text):
        return False
    if path.suffix != ".py":
        return field.search(re.sub(r"//.*", "", text)) is not None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return field.search(ast.unparse(tree)) is not None


def test_every_place_of_a_sampling_field_is_named() -> None:
    found = SECTION.search((ROOT / "CONTRIBUTING.md").read_text())
    assert found is not None
    code = (
        path for folder in FOLDERS for suffix in ("py", "h", "cpp") for path in (ROOT / folder).rglob(f"*.{suffix}")
    )
    known = [*(path.relative_to(ROOT).as_posix() for path in code if knows(path, re.compile(r"\bmin_ps?\b"))), *TABLES]
    missing = [path for path in known if path not in found[1] and f"`{Path(path).name}`" not in found[1]]
    assert not missing, f"CONTRIBUTING.md does not name {missing}, which know min_p"
    named = re.findall(r"`((?:core|toolkit|plugins|conformance|docs|tests)/[\w/.]+\.\w+)`", found[1])
    assert not (gone := [path for path in named if not (ROOT / path).is_file()]), f"there is no {gone}"
