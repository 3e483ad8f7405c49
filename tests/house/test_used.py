"""No function or class is there for tests alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WATCHED = ("core", "toolkit", "plugins")
USERS = (*WATCHED, "conformance", "tools", "benchmarks", "examples", "pegboard")

CALLED_FROM_OUTSIDE = {
    "capture_signals": "overrides uvicorn's",
    "data_received": "asyncio calls it",
    "get_conv_state": "transformers calls it",
    "get_linear_cache": "transformers calls it",
    "get_mask_sizes": "transformers calls it",
    "get_query_offset": "transformers calls it",
    "get_recurrent_state": "transformers calls it",
    "get_seq_length": "transformers calls it",
    "is_recording_past": "transformers calls it",
    "list_commands": "overrides click's",
    "main_loop": "overrides uvicorn's",
    "on_end": "OpenTelemetry calls it",
    "set_linear_cache": "transformers calls it",
    "spare_taken": "shows tests what no client can see",
    "update_conv_state": "transformers calls it",
    "update_recurrent_state": "transformers calls it",
    "writable": "overrides io.RawIOBase's",
}
"""What libraries call, and what is kept although only tests use it."""
MARKED = re.compile(r"hookimpl|validator|serializer|override|abstractmethod")
"""Decorators of what others call."""
WORD = re.compile(r"\w+")


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text("utf-8"))


def mentioned() -> set[str]:
    """Return names that code outside tests reads or has in strings, and those in documents and templates."""
    found: set[str] = set()
    for _, tree in trees(*USERS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.rpartition(":")[2])  # lazy names, and those that `getattr` takes
    for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/plugins/templates/**/*.tmpl")):
        found.update(WORD.findall(path.read_text("utf-8")))
    return found


def test_each_function_and_class_is_used() -> None:
    """By its name alone: who calls what is not worked out, so this finds no function that shares its name with one in
    use.
    """
    used = mentioned() | CALLED_FROM_OUTSIDE.keys()
    unused = []
    for path, tree in trees(*WATCHED):
        if path.stem == "suite" or "suite" in path.parts:
            continue  # pytest collects it
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name in used:
                continue
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if not node.name.startswith("__") and not MARKED.search(marks):
                unused.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not unused, f"nothing outside tests uses these, so delete them or move them to tests: {unused}"


def test_the_exceptions_are_there() -> None:
    names = {getattr(node, "name", "") for _, tree in trees(*WATCHED) for node in ast.walk(tree)}
    assert names >= CALLED_FROM_OUTSIDE.keys()
