"""The pytest11 plugin of the conformance kit. Every pytest of an environment loads it, so it imports little."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

_PACKAGE = "pegboard.conformance"
_SUITE = f"{_PACKAGE}.suite"

MARKERS = (
    "pegboard_capability(name): a conformance test for providers that declare this capability",
    "pegboard_lacks(name): a conformance test for providers that do not declare this capability",
    "gpu: needs a CUDA device; a conformance test is skipped where there is none",
    "full: a conformance test that takes long; deselect it with -m 'not full'",
)


def _rewrite_asserts() -> None:
    """Suites are not test files, so pytest must be told to explain their assertions too. Plugins have theirs in a
    module called `suite`.
    """
    names = [f"{_PACKAGE}.{module.name}" for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    points = importlib.metadata.entry_points(group="pegboard")
    names += [f"{point.module}.suite" for point in points]
    pytest.register_assert_rewrite(*(name for name in names if name not in sys.modules))


def pytest_addoption(parser: pytest.Parser) -> None:
    _rewrite_asserts()  # here, because every run of pytest in one process has its own import hook
    parser.getgroup("pegboard").addoption(
        "--conformance-report",
        metavar="FILE",
        default=None,
        help="write the outcome of every conformance test, by provider, to FILE as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    path = config.getoption("--conformance-report")
    if path:
        from pegboard.conformance.report import Reporter

        config.pluginmanager.register(Reporter(config, Path(path).absolute()), "pegboard-conformance-report")


def pytest_report_header() -> str:
    return f"pegboard: {importlib.metadata.version('pegboard')}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> Any:
    """Conformance classes get a collector of their own; suites themselves are not collected."""
    suite = sys.modules.get(_SUITE)
    if suite is None or not isinstance(obj, type) or not issubclass(obj, suite.ContractSuite):
        return None
    if not suite.is_suite_class(obj):
        return []
    if not collector.istestclass(obj, name):
        return None
    from pegboard.conformance.collecting import SuiteClass

    return SuiteClass.from_parent(collector, name=name, obj=obj)
