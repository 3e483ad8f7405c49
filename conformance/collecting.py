"""How pytest collects conformance classes: checked first, then skipped and expected to fail as the provider says."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from pegboard.conformance.subject import Subject, SuiteError
from pegboard.conformance.suite import (
    CAPABILITY_MARK,
    LACKS_MARK,
    ContractSuite,
    capabilities_of,
    check_suite,
    subject_of,
)
from pegboard.toolkit.text.near_names import did_you_mean

NOT_ASKED = pytest.StashKey[bool]()
"""Set for a test that the provider's record, or this machine, takes out: it is not missed in a verdict."""


class SuiteClass(pytest.Class):
    """The collector of one conformance class."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        suite: type[ContractSuite] = self.obj
        try:
            return self._checked(suite)
        except SuiteError as error:
            raise SuiteError(f"{suite.__name__}: {error}") from None

    def _checked(self, suite: type[ContractSuite]) -> list[pytest.Item | pytest.Collector]:
        check_suite(suite)
        subject, capabilities = subject_of(suite), capabilities_of(suite)
        nodes = list(super().collect())
        items = [node for node in nodes if isinstance(node, pytest.Function)]
        _check_expected(suite.expected_failures, items)
        for item in items:
            for reason in _skip_reasons(item, subject, capabilities):
                item.add_marker(pytest.mark.skip(reason=reason))
                item.stash[NOT_ASKED] = True
            for name in (item.originalname, item.name):
                if name in suite.expected_failures:
                    item.add_marker(pytest.mark.xfail(reason=suite.expected_failures[name], strict=True))
                    break
        return nodes


def suite_of_item(item: pytest.Item) -> SuiteClass | None:
    """Return the conformance class of a test, where it belongs to one."""
    return item.parent if isinstance(item.parent, SuiteClass) else None


def _check_expected(expected: Mapping[str, str], items: Sequence[pytest.Function]) -> None:
    known = {name for item in items for name in (item.originalname, item.name)}
    for name, reason in expected.items():
        if name not in known:
            raise SuiteError(f"expected_failures names {name!r}, which is not a test here; {did_you_mean(name, known)}")
        if not reason:
            raise SuiteError(f"expected_failures must say why {name!r} fails")


def _skip_reasons(item: pytest.Function, subject: Subject, capabilities: frozenset[str]) -> Iterator[str]:
    for mark, wanted in ((CAPABILITY_MARK, True), (LACKS_MARK, False)):
        for marker in item.iter_markers(mark):
            name = marker.args[0]
            if name not in subject.contract.capabilities:
                known = ", ".join(subject.contract.capabilities) or "none"
                raise SuiteError(
                    f"{item.name} is marked with {name!r}, no capability of {subject.contract.name} ({known})"
                )
            if (name in capabilities) != wanted:
                verb = "declares" if not wanted else "does not declare" if name not in subject.capabilities else "lacks"
                yield f"{subject.name} {verb} the capability {subject.contract.name}.{name}"
    if item.get_closest_marker("gpu") is not None and not _cuda_available():
        yield "needs a CUDA device"


def _cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


class InMemory:
    """A pytest plugin that collects conformance classes which stand in no file, and nothing else.

    `classes` answers with the classes by the name that test ids show. It is called during collection, so that pytest
    can explain the assertions of a suite that it imports. `only` keeps the tests of this name (all by default).
    """

    def __init__(
        self, module: str, classes: Callable[[], Mapping[str, type[ContractSuite]]], *, only: str = ""
    ) -> None:
        self.module = module
        self.classes = classes
        self.only = only

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        directory: pytest.Collector = _Directory.from_parent(parent, path=path)
        directory.stash[_SOURCE] = self
        return directory

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.only:
            keep = [item for item in items if isinstance(item, pytest.Function) and item.originalname == self.only]
            config.hook.pytest_deselected(items=[item for item in items if item not in keep])
            items[:] = keep

    def run(self, *args: str, plugins: Sequence[object] = ()) -> int:
        """Run pytest on these classes, with no config and no conftest at all. Returns its exit code."""
        with tempfile.TemporaryDirectory(prefix="pegboard-check-") as directory:
            config = Path(directory, "pytest.ini")
            config.write_text("[pytest]\n", encoding="utf-8")
            arguments = [directory, "-c", str(config), "--rootdir", directory, "-p", "no:cacheprovider", *_CALM, *args]
            return int(pytest.main(arguments, plugins=[self, *plugins]))


# Pegboard is running, so some of what pytest would like to see imported is there already.
_CALM = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
_SOURCE = pytest.StashKey[InMemory]()


class _Directory(pytest.Directory):
    def collect(self) -> Iterable[pytest.Collector]:
        source = self.stash[_SOURCE]
        by_module: dict[str, dict[str, type[ContractSuite]]] = {}
        for name, suite in source.classes().items():
            by_module.setdefault(suite.__module__, {})[name] = suite
        return [self._module(source.module, around, suites) for around, suites in by_module.items()]

    def _module(self, name: str, around: str, suites: Mapping[str, type[ContractSuite]]) -> _Module:
        collector: _Module = _Module.from_parent(self, path=self.path / name)
        collector.generated = ModuleType(name)
        vars(collector.generated).update(_surroundings(sys.modules.get(around)), **suites)
        collector.suites = suites
        return collector


def _surroundings(module: ModuleType | None) -> dict[str, Any]:
    """Return what of a module counts for all tests in it: fixtures, marks, set-up. Not the tests that it has
    besides.
    """
    found = vars(module).items() if module is not None else ()
    return {name: value for name, value in found if not (name.startswith("__") or _is_test(name, value))}


def _is_test(name: str, value: object) -> bool:
    return isinstance(value, type) or (isinstance(value, FunctionType) and name.startswith("test"))


class _Module(pytest.Module):
    """A module that was made and not imported."""

    generated: ModuleType
    suites: Mapping[str, type[ContractSuite]]

    def _getobj(self) -> ModuleType:
        return self.generated

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        super().collect()  # fixtures become known; of what it finds, all but the suites is none of this run's business
        return [SuiteClass.from_parent(self, name=name, obj=suite) for name, suite in self.suites.items()]
