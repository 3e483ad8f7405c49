"""What a nested pytest run came to."""

from __future__ import annotations

import pytest


class Outcomes:
    """A pytest plugin that remembers outcomes: test ids that passed, and the reports of those that failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.skipped: list[str] = []
        self.failed: list[pytest.TestReport] = []
        self.errors: list[pytest.TestReport | pytest.CollectReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.passed.append(report.nodeid) if report.passed else self.failed.append(report)
        elif report.failed:
            self.errors.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report)
