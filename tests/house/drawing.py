"""The house as its imports draw it: rooms, arrows between them, circles, and what has grown too large.

``python -m tests.house.drawing [ROOT]`` prints the table for a checkout. Imports below `if TYPE_CHECKING` and inside
functions count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {name: f"pegboard.{name}" for name in ("core", "toolkit", "plugins", "conformance", "tools")}
FLOORS = (
    "core.interfaces",
    "toolkit",
    "core.registry",
    "core.pipeline",
    "core.frontend",
    "core.worker",
    "core.config",
    "core.engine",
    "core.server",
    "core.cli",
    "conformance",
    "tools",
)
"""Rooms from the ground up. A room imports those below it. `plugins` stands apart: on interfaces and toolkit alone."""
BESIDE = {"core.frontend": "core.pipeline"}
"""Rooms of one height: neither imports the other."""
LONG_FUNCTION = 40
LONG_FILE = 400


@dataclass(frozen=True)
class House:
    """Every module of a checkout by its dotted name, and what it imports of the others."""

    files: Mapping[str, Path]
    trees: Mapping[str, ast.Module]
    imports: Mapping[str, frozenset[str]]
    lines: Mapping[str, int]

    @classmethod
    def read(cls, root: Path = ROOT) -> House:
        """Parse all packages below `root`. Templates of `plugins new` are not code of ours."""
        files = dict(sorted(_files(root)))
        trees = {name: ast.parse(path.read_text("utf-8"), str(path)) for name, path in files.items()}
        imports = {name: frozenset(_imports(tree, files.keys())) - {name} for name, tree in trees.items()}
        lines = {name: path.read_text("utf-8").count("\n") for name, path in files.items()}
        return cls(files, trees, imports, lines)

    def arrows(self) -> Counter[tuple[str, str]]:
        """Return how many imports lead from one room to another."""
        found: Counter[tuple[str, str]] = Counter()
        for name, others in self.imports.items():
            found.update((room(name), room(other)) for other in others if room(name) != room(other))
        return found

    def upwards(self) -> list[tuple[str, str]]:
        """Return the pairs of modules in which the first imports from a room above its own, or beside it."""
        floor = {name: number for number, name in enumerate(FLOORS)}
        return [
            (name, other)
            for name, others in self.imports.items()
            for other in sorted(others)
            if room(name) in floor and room(other) in floor
            if floor[room(other)] > floor[room(name)] or BESIDE.get(room(name)) == room(other)
        ]

    def circles(self) -> list[list[str]]:
        """Return the groups of modules that import each other, directly or not (Tarjan's strong components)."""
        return [sorted(group) for group in _Components(self.imports).groups if len(group) > 1]

    def long_functions(self) -> list[tuple[int, str]]:
        """Return the length and the name of each function of more than LONG_FUNCTION lines, the longest first."""
        found = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > LONG_FUNCTION:
                        found.append((length, f"{name}.{node.name}"))
        return sorted(found, reverse=True)

    def long_files(self) -> list[tuple[int, str]]:
        """Return the length and the name of each module of more than LONG_FILE lines, the longest first."""
        return sorted(((lines, name) for name, lines in self.lines.items() if lines > LONG_FILE), reverse=True)

    def loose_types(self) -> Counter[str]:
        """Return how often core and plugins write `Any`, call `cast` and silence mypy."""
        found: Counter[str] = Counter()
        for name, tree in self.trees.items():
            if not name.startswith(("pegboard.core", "pegboard.toolkit", "pegboard.plugins")):
                continue
            for node in ast.walk(tree):
                found["Any"] += isinstance(node, ast.Name) and node.id == "Any"
                found["cast"] += (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"
                )
            found["type: ignore"] += self.files[name].read_text("utf-8").count("# type: ignore")
        return found


def room(module: str) -> str:
    """Return the room of a module: ``core.pipeline`` of ``pegboard.core.pipeline.batch``, ``plugins`` of a plugin's."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in (root / folder).rglob("*.py"):
            if "templates" not in path.parts:
                rest = path.relative_to(root / folder).with_suffix("").parts
                yield ".".join([package, *(rest[:-1] if rest[-1] == "__init__" else rest)]), path


def _imports(tree: ast.Module, known: object) -> Iterator[str]:
    assert isinstance(known, type({}.keys()))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)  # type: ignore[redundant-expr]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner  # type: ignore[unreachable]
                elif node.module in known:
                    yield node.module  # type: ignore[unreachable]


@dataclass
class _Components:
    graph: Mapping[str, frozenset[str]]
    groups: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._number: dict[str, int] = {}
        self._low: dict[str, int] = {}
        self._stack: list[str] = []
        for name in self.graph:
            if name not in self._number:
                self._visit(name)

    def _visit(self, name: str) -> None:
        self._number[name] = self._low[name] = len(self._number)
        self._stack.append(name)
        for other in self.graph[name]:
            if other not in self._number:
                self._visit(other)
                self._low[name] = min(self._low[name], self._low[other])
            elif other in self._stack:
                self._low[name] = min(self._low[name], self._number[other])
        if self._low[name] == self._number[name]:
            start = self._stack.index(name)
            self.groups.append(self._stack[start:])
            del self._stack[start:]


def table(house: House) -> str:
    """Return the figures of a house as Markdown."""
    files, lines = Counter(map(room, house.files)), defaultdict(int)  # type: ignore[var-annotated]
    for name, count in house.lines.items():
        lines[room(name)] += count
    arrows = house.arrows()
    rows = ["| room | files | lines | rooms it imports |", "| --- | ---: | ---: | ---: |"]
    rows += [f"| {name} | {files[name]} | {lines[name]} | {sum(a == name for a, _ in arrows)} |" for name in files]
    stages = sum(count for name, count in house.lines.items() if name.rpartition(".")[0] == "pegboard.core.pipeline")
    loose = house.loose_types()
    rows += [
        "",
        f"core: {sum(count for name, count in lines.items() if name.startswith('core'))} lines; stages: {stages} lines",
        f"arrows between rooms: {len(arrows)}; upwards: {len(house.upwards())}; circles: {len(house.circles())}",
        f"functions over {LONG_FUNCTION} lines: {len(house.long_functions())}",
        f"files over {LONG_FILE} lines: {len(house.long_files())}",
        f"Any: {loose['Any']}; casts: {loose['cast']}; type: ignore: {loose['type: ignore']}",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    found = House.read(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
    print(table(found))  # noqa: T201
    for circle in found.circles():
        print("circle:", *circle)  # noqa: T201
    for pair in found.upwards():
        print("upwards:", *pair)  # noqa: T201
