"""Makes `pegboard` importable from this tree in a folder of packages: `python benchmarks/gpu/site.py FOLDER`.

The folder gets a distribution with the project's entry points, and a `sitecustomize` that finds the packages where
`setup.py` has them. PYTHONPATH alone would not do: `core/` stands beside `pegboard/`, not in it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

FINDER = '''import importlib.util, os, sys

HOMES = {{f"pegboard.{{name}}": name for name in ("core", "toolkit", "plugins", "conformance", "tools")}}
HOMES["pegboard"] = "pegboard"


class Finder:
    """Finds the packages of a checkout."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in HOMES:
            home = os.path.join({root!r}, HOMES[name])
            file = os.path.join(home, "__init__.py")
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[home])
        return None


sys.meta_path.append(Finder)
'''


def install(root: Path, site: Path) -> None:
    """Write the distribution and the finder into `site`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    info = site / f"pegboard-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pegboard\nVersion: {project['version']}\n")
    lines = []
    for group, entries in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (site / "sitecustomize.py").write_text(FINDER.format(root=str(root)))


if __name__ == "__main__":
    install(Path.cwd(), Path(sys.argv[1]))
