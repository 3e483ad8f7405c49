"""Pickle on sockets and over HTTP (CVE-2025-32444, -47277, -10164, CVE-2026-3059, -3060), and in dumps (CVE-2026-3989):
nothing here can unpickle, because nothing imports what could. Nor is text ever run as code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("core", "toolkit", "plugins", "conformance", "tools") for path in (ROOT / folder).rglob("*.py")
)

MODULES = {
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "pickletools",
        "jsonpickle",
    ),
    # They pickle what goes from one process to another.
    *("multiprocessing", "concurrent.futures.process", "torch.multiprocessing"),
}
CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("send_pyobj", "recv_pyobj", "unsafe_load", "read_pickle", "allow_pickle", "literal_eval", "system"),
}


def sins(path: Path) -> Iterator[str]:
    """Imports and calls of a file that can run what data says."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        yield from (f"{path}:{node.lineno} imports {name}" for name in names if name in MODULES)  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        of = getattr(owner, "id", getattr(owner, "attr", ""))
        options = {one.arg: one.value for one in node.keywords}
        if called in {"eval", "compile"} and owner is not None:
            # A network's eval(); re.compile.
            continue
        if called in CALLS:
            yield f"{path}:{node.lineno} calls {called}"
        if (called == "load" and of in {"torch", "numpy", "np"}) or (called == "full_load" and of == "yaml"):
            yield f"{path}:{node.lineno} calls {of}.{called}"
        if "allow_pickle" in options or getattr(options.get("shell"), "value", False):
            yield f"{path}:{node.lineno} unpickles, or starts a shell"


def test_cve_2025_32444_nothing_is_unpickled_or_run() -> None:
    assert len(SOURCES) > 100
    assert [sin for path in SOURCES for sin in sins(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import multiprocessing",
        "from pickle import loads",
        "from torch import multiprocessing",
        "from concurrent.futures import process",
        "x = torch.load(path, weights_only=True)",
        "x = np.load(path)",
        "x = numpy.load(path, allow_pickle=True)",
        "x = socket.recv_pyobj()",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "yaml.unsafe_load(text)",
    ],
)
def test_it_finds_what_it_looks_for(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sinner.py"
    file.write_text(f"def f():\n    {text}\n")
    assert list(sins(file))


def test_it_lets_others_pass(tmp_path: Path) -> None:
    file = tmp_path / "saint.py"
    file.write_text("import re, json\nx = re.compile('a')\nnetwork.eval()\njson.load(f)\nsubprocess.run(['ls'])\n")
    assert list(sins(file)) == []
