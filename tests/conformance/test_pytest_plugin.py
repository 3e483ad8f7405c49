"""The pytest plugin: light, helpful, and honest in its reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEADER = "from sample import *\n"


def conformance(sample: pytest.Pytester, body: str, report: Path, *args: str) -> dict[str, Any]:
    sample.makepyfile(HEADER + body)
    sample.runpytest(f"--conformance-report={report}", *args)
    content: dict[str, Any] = json.loads(report.read_text())
    return content


CASE = "class TestIt(SampleContract):\n    provider = {!r}\n    registry = REGISTRY\n"


def test_importing_it_is_light() -> None:
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import pegboard.conformance.pytest_plugin\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = set(done.stdout.split())
    assert {name.partition(".")[0] for name in new if name.startswith("pegboard.")} == {"pegboard"}
    assert not new & {"torch", "hypothesis", "numpy", "pydantic", "transformers", "msgspec"}
    assert "pegboard.conformance.suite" not in new


def test_a_pytest_without_conformance_classes_loads_no_kit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            assert "pegboard.conformance.suite" not in sys.modules
            assert "torch" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_header_and_markers(pytester: pytest.Pytester) -> None:
    pytester.runpytest().stdout.fnmatch_lines(["pegboard: 0.*"])
    pytester.runpytest("--markers").stdout.fnmatch_lines(["@pytest.mark.pegboard_capability(name):*"])


def test_assertions_of_suites_are_explained(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pegboard.conformance.schedule_policy import SchedulePolicyContract
        from pegboard.core.interfaces.schedule_policy import SchedulePolicy

        class Loses(SchedulePolicy):
            def order(self, waiting, running):
                return []

        class TestLoses(SchedulePolicyContract):
            factory = Loses
        """
    )
    result = pytester.runpytest_subprocess("-x", "--tb=short")
    assert result.ret == 1
    result.stdout.re_match_lines([r"E +assert not \[Req\(.*"])


class TestReport:
    def test_says_what_was_tested(self, sample: pytest.Pytester, report_file: Path) -> None:
        content = conformance(sample, CASE.format("arrival") + "    options = {'backwards': True}\n", report_file)
        assert content["format"] == 1
        assert set(content["environment"]) >= {"pegboard", "plugin_api", "python", "platform", "torch"}
        (entry,) = content["providers"]
        tests = entry.pop("tests")
        assert entry == {
            "contract": "schedule_policy",
            "contract_version": "1.0",
            "provider": "arrival",
            "class": "test_says_what_was_tested.py::TestIt",
            "plugin": "sample",
            "plugin_version": "1.2",
            "distribution": "sample-distribution",
            "distribution_version": "1.2",
            "capabilities": [],
            "options": {"backwards": True},
            "verdict": "passed",
            "counts": {"passed": 4, "skipped": 1},
        }
        assert {test["name"]: test["outcome"] for test in tests} == {
            "test_keeps_all": "passed",
            "test_counts[0]": "passed",
            "test_counts[2]": "passed",
            "test_reads_the_cache": "skipped",
            "test_leaves_the_cache_alone": "passed",
        }
        reasons = {test["name"]: test["reason"] for test in tests}
        assert reasons["test_reads_the_cache"].startswith("arrival does not declare")

    @pytest.mark.parametrize(
        ("body", "args", "verdict", "counts"),
        [
            (CASE.format("forgetful"), (), "failed", {"failed": 2, "passed": 2, "skipped": 1}),
            (
                CASE.format("forgetful") + "    expected_failures = {'test_keeps_all': 'a', 'test_counts[2]': 'b'}\n",
                (),
                "expected_failures",
                {"passed": 2, "skipped": 1, "xfailed": 2},
            ),
            (
                CASE.format("arrival") + "    expected_failures = {'test_keeps_all': 'a'}\n",
                (),
                "failed",
                {"passed": 3, "skipped": 1, "xpassed": 1},
            ),
            (
                CASE.format("arrival") + "    def build(self, ctx):\n        pytest.skip('nothing to try it on')\n",
                (),
                "hardly_tested",
                {"passed": 1, "skipped": 4},
            ),
            (CASE.format("arrival"), ("-k", "keeps"), "incomplete", {"passed": 1}),
            (CASE.format("aware"), ("-k", "leaves"), "nothing_ran", {"skipped": 1}),
            (
                CASE.format("arrival")
                + "    @pytest.fixture\n    def waiting(self):\n        raise ValueError('oh')\n",
                (),
                "failed",
                {"error": 1, "passed": 3, "skipped": 1},
            ),
        ],
    )
    def test_verdicts(
        self, sample: pytest.Pytester, report_file: Path, body: str, args: Any, verdict: str, counts: dict[str, int]
    ) -> None:
        (entry,) = conformance(sample, body, report_file, *args)["providers"]
        assert (entry["verdict"], entry["counts"]) == (verdict, counts)

    def test_a_class_that_cannot_be_collected_is_an_error(self, sample: pytest.Pytester, report_file: Path) -> None:
        content = conformance(sample, CASE.format("nobody"), report_file)
        assert content["providers"] == []
        (error,) = content["errors"]
        assert error["class"].endswith("::TestIt")
        assert "'nobody' is not" in error["message"] or "no schedule_policy provider 'nobody'" in error["message"]

    def test_other_tests_are_no_part_of_it(self, sample: pytest.Pytester, report_file: Path) -> None:
        content = conformance(sample, "def test_other():\n    pass\n", report_file)
        assert content["providers"] == []

    def test_workers_send_theirs(self, sample: pytest.Pytester, report_file: Path) -> None:
        content = conformance(sample, CASE.format("arrival"), report_file, "-n", "1")
        (entry,) = content["providers"]
        assert entry["counts"] == {"passed": 4, "skipped": 1}
