"""The three rules that hold the house up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pegboard.core.registry.registry import Registry

ROOT = Path(__file__).parents[2]
CORE = sorted(path for folder in ("core", "toolkit") for path in (ROOT / folder).rglob("*.py"))
TOOLKIT = sorted((ROOT / "toolkit").rglob("*.py"))
PLUGINS = sorted(path for path in (ROOT / "plugins").rglob("*.py") if path.parent.name != "plugins")
ALLOWED = ("pegboard.core.interfaces", "pegboard.toolkit")

PLAIN_WORDS = {
    "fifo": "an order of eviction",
    "logit_bias": "a sampling parameter",
    "min_new_tokens": "a sampling parameter",
    "none": "an empty list, in a message",
    "prefetch": "a capability",
    "priority": "a request's field",
    "triton": "the library",
}
"""Provider names that are words of the field too, and what the core means by them. It may write these and no others."""


@cache
def parse(path: Path) -> ast.Module:
    """Each file is read by several rules, and no test changes a tree."""
    return ast.parse(path.read_text("utf-8"), str(path))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything that a file imports, wherever in it."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write absolute ones, so that this test can read them"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a file that is not a docstring."""
    tree = parse(path)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def plugin_names() -> frozenset[str]:
    return frozenset(
        point.name for point in entry_points(group="pegboard") if point.dist and point.dist.name == "pegboard"
    )


@cache
def provider_names() -> frozenset[str]:
    return frozenset(
        provider.name for one in Registry.discover().plugins if one.origin.builtin for provider in one.plugin.providers
    )


def is_suite(path: Path) -> bool:
    """Return whether a file is the suite of a plugin's contracts, or is in the folder of it."""
    return "suite" in path.relative_to(ROOT).with_suffix("").parts


_SUITE = re.compile(r"pegboard\.plugins\.\w+\.suite\.")


@cache
def apis_required_by(name: str) -> tuple[str, ...]:
    loaded = Registry.discover().plugin(name)
    return tuple(f"pegboard.plugins.{one}.api" for one in loaded.plugin.requires) if loaded else ()


FIELDS = {"grammar": "a parameter of requests, which the plugin of this name serves"}
"""Names of plugins that core or toolkit have for something else."""


class TestFirstRule:
    """The core knows no plugin."""

    @pytest.mark.parametrize("path", CORE, ids=relative)
    def test_core_imports_no_plugin(self, path: Path) -> None:
        assert not [name for name in imports(path) if name.startswith("pegboard.plugins")]

    @pytest.mark.parametrize("path", CORE, ids=relative)
    def test_no_plugin_is_named_in_core(self, path: Path) -> None:
        names = plugin_names() - FIELDS.keys()
        assert not [(line, text) for line, text in strings(path) if text in names or "pegboard.plugins." in text]

    @pytest.mark.parametrize("path", CORE, ids=relative)
    def test_no_provider_is_named_in_core(self, path: Path) -> None:
        names = provider_names() - PLAIN_WORDS.keys()
        assert not [(line, text) for line, text in strings(path) if text in names]

    def test_no_excuse_is_stale(self) -> None:
        written = {text for path in CORE for _, text in strings(path)}
        assert not [word for word in PLAIN_WORDS if word not in written or word not in provider_names()]
        assert not [word for word in FIELDS if word not in written or word not in plugin_names()]

    def test_it_finds_what_it_looks_for(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.py"
        path.write_text('"""cache_radix"""\nfrom pegboard.plugins import cache_radix\nx = "cache_radix"\ny = "lpm"\n')
        assert list(imports(path)) == ["pegboard.plugins.cache_radix"]
        assert list(strings(path)) == [(3, "cache_radix"), (4, "lpm")]
        assert "cache_radix" in plugin_names()
        assert "lpm" in provider_names() - PLAIN_WORDS.keys()


class TestSecondRule:
    """A plugin sees the interfaces and the toolkit, and nothing of another plugin."""

    @pytest.mark.parametrize("path", PLUGINS, ids=relative)
    def test_imports(self, path: Path) -> None:
        name = path.relative_to(ROOT / "plugins").parts[0]
        allowed = (f"pegboard.plugins.{name}", *ALLOWED, *apis_required_by(name))
        if is_suite(path):
            suites = (f"{one.removesuffix('.api')}.suite" for one in apis_required_by(name))
            allowed = (*allowed, "pegboard.conformance", *suites)
        ours = [name for name in imports(path) if name == "pegboard" or name.startswith("pegboard.")]
        found = [name for name in ours if not any(f"{name}.".startswith(f"{one}.") for one in allowed)]
        assert not found, (
            f"a plugin imports {' and '.join(allowed[1:])} and itself only (and the module `api` of a plugin that its "
            "record requires); conformance classes are under tests/plugins, and the suite of its contract in `suite`"
        )

    def test_no_plugin_imports_its_suite(self) -> None:
        """A suite needs pytest, which a server has not."""
        others = (path for path in PLUGINS if not is_suite(path))
        found = [relative(path) for path in others if any(_SUITE.match(name) for name in imports(path))]
        assert not found

    def test_what_a_record_requires_is_there_and_imported(self) -> None:
        for name in plugin_names():
            used = {one for path in (ROOT / "plugins" / name).rglob("*.py") for one in imports(path)}
            for api in apis_required_by(name):
                assert any(one.startswith(f"{api}.") for one in used), f"{name} requires {api} and does not import it"

    def test_the_toolkit_and_the_interfaces_see_no_more_than_each_other(self) -> None:
        bad = []
        for path in (*(ROOT / "core" / "interfaces").rglob("*.py"), *TOOLKIT):
            allowed = ALLOWED if path in TOOLKIT else ALLOWED[:1]
            for name in imports(path):
                if name.startswith("pegboard.") and not name.startswith(allowed):
                    bad.append((relative(path), name))
        assert not bad


class TestThirdRule:
    """Contracts, records and the command line are light. The command line's own test is in test_cli.py."""

    @staticmethod
    def loaded_by(code: str) -> str:
        heavy = ["torch", "transformers"]
        code += f"\nimport sys; sys.exit(str([name for name in {heavy} if name in sys.modules]))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
        return done.stderr.strip()

    def test_interfaces_import_neither_torch_nor_transformers(self) -> None:
        code = "import pegboard.core.interfaces as all\nfor name in all.__all__: getattr(all, name)"
        assert self.loaded_by(code) == "[]"

    def test_neither_do_plugin_records(self) -> None:
        assert (
            self.loaded_by("from pegboard.core.registry.registry import Registry\nassert Registry.discover().plugins")
            == "[]"
        )

    def test_neither_do_options_and_config(self) -> None:
        code = (
            "from pegboard.core.registry.registry import Registry\n"
            "from pegboard.tools.config.schema import schema\n"
            "schema(Registry.discover())"
        )
        assert self.loaded_by(code) == "[]"

    def test_records_hold_nothing_but_the_record(self) -> None:
        """A record module is imported whenever plugins are listed: it imports the record format and no more."""
        for name in plugin_names():
            found = {one.rpartition(".")[0] for one in imports(ROOT / "plugins" / name / "__init__.py")}
            # Types of its own contracts, which are imported for the type checker alone.
            types = {one for one in found if one.startswith(("pegboard.toolkit.", f"pegboard.plugins.{name}.api"))}
            found -= {"__future__", "typing", *types}
            assert found <= {"pegboard.core.interfaces.plugin", "pegboard.core.interfaces.contract"}, (
                f"plugins/{name}/__init__.py: a record imports the modules plugin and contract of "
                "pegboard.core.interfaces and nothing else"
            )
            assert not types & self.at_run_time(ROOT / "plugins" / name / "__init__.py")

    @staticmethod
    def at_run_time(path: Path) -> set[str]:
        return {f"{node.module}" for node in parse(path).body if isinstance(node, ast.ImportFrom)}
