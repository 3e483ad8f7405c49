"""The conformance report: what ``--conformance-report=FILE`` writes and ``pegboard plugins matrix`` shows.

One JSON object::

    {"format": 1,
     "environment": {"pegboard": "0.1.0", "plugin_api": "1.0", "python": "3.12.1", "platform": "...", "torch": "..."},
     "providers": [{
         "contract": "prefix_cache", "contract_version": "1.0", "provider": "mine", "class": "tests/...::TestMine",
         "plugin": "mine", "plugin_version": "0.1.0",
         "distribution": "my-package", "distribution_version": "0.1.0",
         "capabilities": ["reuse"], "options": {}, "verdict": "passed", "counts": {"passed": 31, "skipped": 2},
         "tests": [{"name": "test_lock_keeps", "outcome": "passed", "reason": ""}, ...]}],
     "errors": [{"class": "tests/...::TestOther", "message": "..."}]}

An outcome is passed, failed, error (outside the test's own code), skipped, xfailed (an expected failure) or xpassed
(one that passed after all, which is a failure). A verdict is `passed`; `expected_failures` where some are on
record; `failed`; `incomplete` where tests of the class were deselected; `nothing_ran` where none passed;
`hardly_tested` where so few did that it says next to nothing (see `hardly_tested`).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.collecting import NOT_ASKED, SuiteClass, suite_of_item
from pegboard.conformance.suite import capabilities_of, subject_of
from pegboard.core.interfaces.plugin import API_VERSION

FORMAT = 1
_ATTRIBUTE = "pegboard_conformance"
_NOT_ASKED = "pegboard_not_asked"


class Reporter:
    """Gathers the outcomes of conformance tests and writes them when the run ends."""

    def __init__(self, config: pytest.Config, path: Path | None) -> None:
        self.path = None if hasattr(config, "workerinput") else path
        self.providers: dict[str, dict[str, Any]] = {}
        self.errors: list[dict[str, str]] = []
        self.deselected: set[str] = set()
        self.not_asked: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        suite = suite_of_item(item)
        if suite is not None:
            # Plain values on the report itself, so that they travel from a worker process.
            setattr(report, _ATTRIBUTE, describe(suite))
            setattr(report, _NOT_ASKED, item.stash.get(NOT_ASKED, False))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        subject = getattr(report, _ATTRIBUTE, None)
        if subject is None:
            return
        tests = self.providers.setdefault(subject["class"], {**subject, "tests": {}})["tests"]
        outcome, reason = _outcome(report)
        self.not_asked[subject["class"]] += report.when == "setup" and getattr(report, _NOT_ASKED)
        if outcome != "passed" or report.when == "call":
            name = report.nodeid.removeprefix(subject["class"] + "::")
            known = tests.get(name)
            if known is None or known["outcome"] == "passed":
                tests[name] = {"name": name, "outcome": outcome, "reason": reason}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append({"class": report.nodeid, "message": report.longreprtext})

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected |= {suite.nodeid for suite in map(suite_of_item, items) if suite is not None}

    def pytest_sessionfinish(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content(), indent=2) + "\n", encoding="utf-8")

    def content(self) -> dict[str, Any]:
        """Return the report as it is written."""
        providers = []
        for entry in self.providers.values():
            tests = list(entry["tests"].values())
            counts = Counter(test["outcome"] for test in tests)
            missed = counts["skipped"] - self.not_asked[entry["class"]]
            verdict = _verdict(counts, complete=entry["class"] not in self.deselected, missed=missed)
            providers.append({**entry, "verdict": verdict, "counts": dict(sorted(counts.items())), "tests": tests})
        return {"format": FORMAT, "environment": environment(), "providers": providers, "errors": self.errors}


def describe(suite: SuiteClass) -> dict[str, Any]:
    """Return whose provider it is, as plain values; plugin and distribution are empty for a class that is not
    registered.
    """
    subject = subject_of(suite.obj)
    registered = subject.record if subject.factory is None else None
    return {
        "contract": subject.contract.name,
        "contract_version": subject.contract.version,
        "provider": subject.name,
        "class": suite.nodeid,
        "plugin": registered.plugin.name if registered else "",
        "plugin_version": registered.plugin.version if registered else "",
        "distribution": registered.origin.distribution if registered else "",
        "distribution_version": registered.origin.version if registered else "",
        "capabilities": sorted(capabilities_of(suite.obj)),
        "options": json.loads(json.dumps(dict(suite.obj.options), default=str)),
    }


def environment() -> dict[str, str]:
    """Versions that a result depends on. Imports none of the libraries."""
    versions = {"plugin_api": API_VERSION, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("pegboard", "torch", "transformers", "triton", "numpy", "pytest", "hypothesis"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _outcome(report: pytest.TestReport) -> tuple[str, str]:
    xfail = getattr(report, "wasxfail", None)
    if report.skipped:
        return ("skipped", skip_reason(report)) if xfail is None else ("xfailed", xfail.removeprefix("reason: "))
    if report.failed:
        text = report.longreprtext
        if text.startswith("[XPASS(strict)]"):
            return "xpassed", text
        return ("failed" if report.when == "call" else "error"), text.strip().rpartition("\n")[2]
    return "passed", ""


def skip_reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def hardly_tested(counts: Mapping[str, int], missed: int) -> bool:
    """Return whether fewer than a third of the tests that apply have run; `missed` were skipped for want of something
    that the test class or the place should have given, and not since the record leaves a capability out.
    """
    return 2 * (counts.get("passed", 0) + counts.get("xfailed", 0)) < missed


def _verdict(counts: Counter[str], *, complete: bool, missed: int) -> str:
    if counts["failed"] or counts["error"] or counts["xpassed"]:
        return "failed"
    if not counts["passed"]:
        return "nothing_ran"
    if not complete:
        return "incomplete"
    if hardly_tested(counts, missed):
        return "hardly_tested"
    return "expected_failures" if counts["xfailed"] else "passed"
