"""Finds the tests of one plugin or module: ``python -m tests.house.find cache_radix`` prints their paths."""

from __future__ import annotations

import sys
from pathlib import Path

from pegboard.toolkit.text.near_names import nearest
from tests.conformance.builtins import OWN

TESTS = Path(__file__).parents[1]
BUILTINS = tuple(TESTS / "conformance" / f"test_builtins{more}.py" for more in ("", "_that_compute"))
"""The suites of built-in providers: their classes have their plugin's name in theirs."""


def find(name: str, tests: Path = TESTS) -> list[Path]:
    """Return the folders called `name`, and the files `test_<name>.py` and `test_<name>_mutants.py` outside of them.
    Where there is no such file, return all files `test_<name>*.py`. Raises LookupError with near misses.
    """
    wanted = name.removeprefix("test_").removesuffix(".py")
    if not wanted.isidentifier():
        raise LookupError(f"{name!r} is not a name; give a plugin's or a module's, such as cache_radix")
    folders = [path for path in tests.rglob(wanted) if path.is_dir()]
    files = [path for path in tests.rglob(f"test_{wanted}*.py") if not any(one in path.parents for one in folders)]
    exact = {f"test_{wanted}.py", f"test_{wanted}_mutants.py"}
    files = [path for path in files if path.name in exact] or files
    if in_table(wanted):
        files += BUILTINS
    if folders or files:
        return sorted({*folders, *files})
    known = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")}
    known |= {path.parent.name for path in tests.rglob("test_*.py")}
    close = nearest(wanted, sorted(known))
    hint = f"did you mean {' or '.join(close)}?" if close else "give a plugin's or a module's name, such as cache_radix"
    raise LookupError(f"no tests are called {name!r}; {hint}")


def in_table(name: str) -> bool:
    """Return whether a plugin's conformance classes are made from the table, and not in a folder of its own."""
    return name not in OWN and (TESTS.parent / "plugins" / name).is_dir()


def words(name: str) -> list[str]:
    """Return pytest's arguments for the tests of a name. Of the table's classes it takes those of the plugin."""
    return [*map(str, find(name)), *(("-k", name) if in_table(name) else ())]


if __name__ == "__main__":
    try:
        sys.stdout.write(" ".join(words(sys.argv[1] if sys.argv[1:] else "")) + "\n")
    except LookupError as error:
        sys.exit(f"make test-one NAME=...: {error}")
