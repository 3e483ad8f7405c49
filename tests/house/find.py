"""Finds the tests of one plugin or module: ``python -m tests.house.find cache_radix`` prints their paths."""

from __future__ import annotations

import sys
from pathlib import Path

from pegboard.toolkit.text.near_names import nearest

TESTS = Path(__file__).parents[1]


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
    if folders or files:
        return sorted({*folders, *files})
    known = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")}
    known |= {path.parent.name for path in tests.rglob("test_*.py")}
    close = nearest(wanted, sorted(known))
    hint = f"did you mean {' or '.join(close)}?" if close else "give a plugin's or a module's name, such as cache_radix"
    raise LookupError(f"no tests are called {name!r}; {hint}")


if __name__ == "__main__":
    try:
        sys.stdout.write(" ".join(str(path) for path in find(sys.argv[1] if sys.argv[1:] else "")) + "\n")
    except LookupError as error:
        sys.exit(f"make test-one NAME=...: {error}")
