"""Every contract has docs, a suite that can fail, and a conformance test of every built-in provider; every hook too."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import pegboard.core.interfaces as interfaces
import pegboard.core.interfaces.contracts as contracts
from docs._build.config import builtin_registry
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.contract import Contract
from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.core.interfaces.hooks import POINTS, HookSpecs
from pegboard.core.interfaces.options import Component
from pegboard.core.registry.hooks import HOOK_NAMES
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.lazy_names import import_name
from tests.conformance.builtins import OWN, classes

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
EVERY = builtin_registry().contracts
"""The core's contracts, and those of built-in plugins."""
TESTED = [contract for contract in EVERY.values() if contract.suite]
FOUND = Registry.discover()
BUILT_INS = [record for contract in TESTED for record in FOUND.providers(contract.name) if record.origin.builtin]


def named(contract: Contract) -> str:
    return contract.name


def context_of(interface: Any) -> str:
    """Return the name of the class from which a contract's providers are built."""
    for base in interface.__orig_bases__:
        if get_origin(base) is Component:
            context: type = get_args(base)[1]
            return context.__name__
    return str(inspect.signature(interface.__init__).parameters["ctx"].annotation)


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        target = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(target):
            yield name, target


class TestPlaces:
    """A new contract is complete, or one of these says what it lacks."""

    @pytest.mark.parametrize("contract", EVERY.values(), ids=named)
    def test_it_has_a_provider(self, contract: Contract) -> None:
        found = Registry.discover().providers(contract.name)
        assert any(one.origin.builtin for one in found), f"no built-in plugin provides {contract.name}"

    def test_each_process_looks_early_at_what_it_builds(self) -> None:
        files = ("server/serve.py",)
        built = {
            getattr(contracts, alias.name).name
            for file in files
            for node in ast.walk(ast.parse((ROOT / "core" / file).read_text("utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module == "pegboard.core.interfaces.contracts"
            for alias in node.names
            if isinstance(getattr(contracts, alias.name), Contract)
        }
        assert built == {one.name for one in CONTRACTS.values() if one.api_side}, f"`api_side` is what {files} build"


class TestDocs:
    @pytest.mark.parametrize("contract", EVERY.values(), ids=named)
    def test_every_contract_says_what_it_demands(self, contract: Contract) -> None:
        interface = import_name(contract.interface)
        module = inspect.getmodule(interface)
        assert module is not None
        assert (module.__doc__ or "").startswith("Contract: ")
        assert interface.__doc__
        assert contract.summary
        bare = [name for name, function in public_members(interface) if not function.__doc__]
        assert not bare, f"{interface.__name__} has public members without a docstring: {bare}"

    @pytest.mark.parametrize("contract", EVERY.values(), ids=named)
    def test_every_contract_has_a_documented_context(self, contract: Contract) -> None:
        interface = import_name(contract.interface)
        annotation = context_of(interface)
        context = getattr(inspect.getmodule(interface), annotation)
        assert dataclasses.is_dataclass(context)
        assert context.__dataclass_params__.frozen  # type: ignore[union-attr]
        assert inspect.getdoc(context)
        assert not inspect.getdoc(context).startswith(f"{annotation}(")  # type: ignore[union-attr]

    @pytest.mark.parametrize("contract", EVERY.values(), ids=named)
    def test_every_contract_asks_the_same_way(self, contract: Contract) -> None:
        interface = import_name(contract.interface)
        assert list(inspect.signature(interface.__init__).parameters) == ["self", "options", "ctx"]
        assert isinstance(inspect.getattr_static(interface, "supports"), classmethod)

    @pytest.mark.parametrize("contract", EVERY.values(), ids=named)
    def test_every_capability_is_explained(self, contract: Contract) -> None:
        assert all(contract.capabilities.values())


class TestTable:
    @pytest.mark.parametrize("contract", EVERY.values(), ids=named)
    def test_its_type_says_what_is_built_of_what(self, contract: Contract) -> None:
        """The type checker reads the annotation, and the registry the lazy name: both mean one class."""
        interface = import_name(contract.interface)
        context = context_of(interface)
        owners = [loaded.plugin.name for loaded in builtin_registry().plugins if contract in loaded.plugin.contracts]
        module = import_module(f"pegboard.plugins.{owners[0]}") if owners else contracts
        annotation = module.__annotations__[contract.name.upper()]
        assert annotation == f"Contract[{interface.__name__}, {context}]"
        assert getattr(module, contract.name.upper()) is contract


class TestSuites:
    @pytest.mark.parametrize("contract", TESTED, ids=named)
    def test_it_is_where_the_table_says(self, contract: Contract) -> None:
        suite = import_name(contract.suite)
        assert issubclass(suite, ContractSuite)
        assert suite.contract == contract.name
        assert suite.__doc__
        assert suite._suite_tests, "a suite without a test"

    @pytest.mark.parametrize("contract", TESTED, ids=named)
    def test_a_capability_that_somebody_declares_is_tested(self, contract: Contract) -> None:
        declared = {one for record in BUILT_INS if record.contract is contract for one in record.provides}
        modules = {inspect.getfile(cls) for cls in import_name(contract.suite).__mro__ if cls is not object}
        more = (ROOT / "plugins").rglob("suite/*.py")  # what plugins ask of their own kinds of providers
        source = "".join(path.read_text() for path in (*map(Path, modules), *more))
        untested = [name for name in declared & set(contract.capabilities) if f'"{name}"' not in source]
        assert not untested, f"the suite of {contract.name} has no test of {untested}"

    @pytest.mark.parametrize("contract", TESTED, ids=named)
    def test_it_has_mutants(self, contract: Contract) -> None:
        """A mutants file, whose every mutant names a test of the suite."""
        suite = import_name(contract.suite)
        module = contract.suite.partition(":")[0].rpartition(".")[2]
        path = TESTS / "mutants" / f"test_{contract.name if module == 'suite' else module}_mutants.py"
        assert path.exists(), f"{path.relative_to(ROOT)} is missing"
        text = path.read_text()
        assert "assert_caught" in text
        used = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        caught_by = used & set(suite._suite_tests)
        assert len(caught_by) >= 3, f"mutants are caught by no more than {sorted(caught_by)}"  # type: ignore[type-var]

    @pytest.mark.parametrize("record", BUILT_INS, ids=lambda one: f"{one.provider.contract}-{one.name}")
    def test_every_built_in_is_put_to_it(self, record: Any) -> None:
        """By the table of tests/conformance, or in its plugin's folder where that says so."""
        if record.plugin.name not in OWN:
            assert (record.contract.name, record.name) in of_the_table()
            return
        folder = TESTS / "plugins" / record.plugin.name
        assert record.name in conformance_tests(folder, record.contract), (
            f"no class in {folder.relative_to(ROOT)} runs {record.contract.suite} with provider = {record.name!r}"
        )


@cache
def of_the_table() -> set[tuple[str, str]]:
    """The contracts and providers of the classes that the table makes."""
    made = [cls for compute in (False, True) for _, cls in classes(__name__, compute=compute)]
    return {(cls.contract, cls.provider) for cls in made}


def conformance_tests(folder: Path, contract: Contract) -> set[str]:
    """The providers that conformance classes below `folder` name, read without importing them."""
    suite = import_name(contract.suite)
    found = set()
    for path in folder.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        suites = {suite.__name__, *_suites_of_plugins(tree, suite)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                name in ast.unparse(base) for base in node.bases for name in suites
            ):
                found |= {ast.literal_eval(value) for value in _assigned(node, "provider")}
    return found


def _suites_of_plugins(tree: ast.Module, suite: type) -> Iterator[str]:
    """Yield the names under which a module imports suites of plugins that go on from `suite`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and ".suite" in (node.module or ""):
            for alias in node.names:
                found = getattr(import_module(str(node.module)), alias.name)
                if isinstance(found, type) and issubclass(found, suite):
                    yield alias.asname or alias.name


def _assigned(node: ast.ClassDef, name: str) -> Iterator[ast.expr]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and any(ast.unparse(target) == name for target in statement.targets):
            yield statement.value


class TestHooks:
    def test_the_tables_name_every_hook(self) -> None:
        assert sorted(point.name for point in POINTS) == sorted(HOOK_NAMES)

    @pytest.mark.parametrize("name", HOOK_NAMES)
    def test_every_hook_says_when_it_is_called(self, name: str) -> None:
        assert getattr(HookSpecs, name).__doc__

    @pytest.mark.parametrize("name", HOOK_NAMES)
    def test_every_hook_has_a_test(self, name: str) -> None:
        tree = ast.parse((TESTS / "core" / "pipeline" / "test_hook_calls.py").read_text())
        tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert any(test.startswith("test_") and name in test for test in tests), f"no test is named after {name}"

    @pytest.mark.parametrize("name", HOOK_NAMES)
    def test_every_hook_is_explained_to_authors(self, name: str) -> None:
        assert f"`{name}`" in (ROOT / "docs" / "plugins.md").read_text()


class TestExports:
    def test_all_is_what_is_exported(self) -> None:
        assert sorted(set(interfaces.__all__)) == sorted(interfaces.__all__)
        assert set(interfaces.__all__) == set(interfaces._HOME)
        assert sorted(dir(interfaces)) == sorted(interfaces.__all__)
        for name in interfaces.__all__:
            assert getattr(interfaces, name) is not None

    def test_every_import_for_type_checkers_is_an_export(self) -> None:
        """One that is written in another way would be a name for mypy alone."""
        source = ast.parse(Path(inspect.getfile(interfaces)).read_text())
        block = next(node for node in source.body if isinstance(node, ast.If))
        typed = {
            alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert typed == interfaces._HOME

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = interfaces.Nothing

    @pytest.mark.parametrize("contract", CONTRACTS.values(), ids=named)
    def test_every_contract_is_exported_with_its_context(self, contract: Contract) -> None:
        module, _, name = contract.interface.partition(":")
        context = context_of(import_name(contract.interface))
        missing = {name, context} - set(interfaces.__all__)
        assert not missing, f"export {sorted(missing)} in core/interfaces/__init__.py"
        assert getattr(interfaces, name) is getattr(importlib.import_module(module), name)
