"""A check with no test file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pegboard.conformance import check
from pegboard.core.interfaces.errors import PluginError

PROGRAM = """
import importlib.metadata, json, os, sys
import hypothesis, pytest, torch
import pegboard.core.registry.registry, pegboard.conformance.check
for plugin in importlib.metadata.entry_points(group="pytest11"):
    if plugin.name != "pegboard":
        plugin.load()
for line in sys.stdin:
    args, cwd, path, out, err = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(cwd)
        sys.path[:0] = path
        code = 70
        try:
            from pathlib import Path
            report = Path(args[2]) if any(args[2:3]) else None
            code = pegboard.conformance.check.run(*args[:2], report=report, extra_args=args[3:])
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Forks for each check. torch, which takes seconds to import, is there by then; the suites are not, so that pytest
can rewrite their assertions."""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Check = Callable[..., Done]


@pytest.fixture(scope="module")
def checker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_check(checker: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Run a check as in a new process, with the folder `site` of `cwd`, where there is one, on its path."""

    def run(*args: str, cwd: Path) -> Done:
        out, err = (tmp_path_factory.mktemp("output") / name for name in ("out", "err"))
        path = [str(cwd / "site")] if (cwd / "site").is_dir() else []
        assert checker.stdin is not None
        assert checker.stdout is not None
        print(json.dumps([args, str(cwd), path, str(out), str(err)]), file=checker.stdin, flush=True)
        code = int(checker.stdout.readline())
        return Done(code, out.read_text(), err.read_text())

    return run


def test_a_built_in(run_check: Check, tmp_path: Path) -> None:
    done = run_check("schedule_policy", "fcfs", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fcfs does not declare the capability schedule_policy.cache_aware" in done.stdout
    assert "warning" not in done.stdout
    (entry,) = json.loads((tmp_path / "report.json").read_text())["providers"]
    assert (entry["provider"], entry["plugin"], entry["verdict"]) == ("fcfs", "policy_basic", "passed")
    assert entry["class"].endswith("schedule_policy::fcfs")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "a check leaves nothing behind"


def test_a_plain_speculator(run_check: Check, tmp_path: Path) -> None:
    """What the suite asks of those that draft on the device is told once, and no traceback stands beside it."""
    done = run_check("speculator", "none", "", "-k", "Device or device or judg or concerns", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("does not declare the capability speculator.device") == 1
    assert len([line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]) <= 3
    assert "Traceback" not in done.stdout + done.stderr


SITE = {
    "mine.py": """
from pegboard.core.interfaces import OPEN, AdmissionGate, Plugin, Provider, SchedulePolicy, Verdict

class Loses(SchedulePolicy):
    def order(self, waiting, running):
        return list(waiting)[1:]

class Refuses(SchedulePolicy):
    @classmethod
    def supports(cls, options, ctx):
        return "no"
    def order(self, waiting, running):
        return list(waiting)

class Waits(AdmissionGate):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.due = {}
    def concerns(self, req):
        return bool({"waits", "bare"} & {*req.params})
    def enter(self, req):
        (said,) = req.params.values()
        if type(said) is not float or said < 0:
            return Verdict.failed("it must be a number of seconds")
        self.due[req.rid] = self.ctx.clock() + said
        return self.poll([req])[req.rid]
    def poll(self, blocked):
        now = self.ctx.clock()
        return {req.rid: Verdict.blocked("time") if now < self.due[req.rid] else OPEN for req in blocked}
    def cancel(self, req):
        self.due.pop(req.rid, None)
    def finished(self, req):
        self.cancel(req)
        return False

def gate(name, **fields):
    return Provider("admission_gate", name, "mine:Waits", "waits", **fields)

plugin = Plugin("mine", "1", (
    gate("waits", conformance="mine_tests:TestWaits"),
    gate("bare"),
    gate("lost", conformance="mine_testz:TestWaits"),
    gate("foreign", conformance=("mine_tests:TestWaits",)),
    gate("odd", conformance="mine:Waits"),
    gate("bad", conformance="mine.tests"),
    Provider("schedule_policy", "loses", "mine:Loses", "loses requests"),
    Provider("schedule_policy", "refuses", "mine:Refuses", "works nowhere"),
))
""",
    "mine_tests.py": """
from pegboard.conformance.admission_gate import AdmissionGateContract, gated_request

class TestWaits(AdmissionGateContract):
    provider = "waits"

    def blocked_request(self, gate):
        return gated_request({"waits": 0.5})

    def test_of_my_own(self, gate):
        words = ["mine", "too"]
        assert "mine" in words
""",
    "mine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
    "mine-1.0.dist-info/entry_points.txt": "[pegboard]\nmine = mine:plugin\n",
}


BESIDE = """
import pytest

READY = []

def setup_module():
    READY.append(3)

@pytest.fixture
def numbers(more):
    return [more]

@pytest.fixture(scope="module")
def more(tests_count):
    return tests_count

@pytest.fixture(scope="module")
def tests_count():
    return 3

@pytest.fixture(autouse=True)
def steady(more):
    assert READY == [more]

def test_of_another_kind():
    assert False

class TestOther:
    def test_of_another_kind_too(self):
        assert False
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that looks as if a distribution was installed into it, on the path of checks."""
    folder = tmp_path / "site"
    for name, text in SITE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_broken_one_fails_and_says_why(run_check: Check, site: Path, tmp_path: Path) -> None:
    done = run_check("schedule_policy", "loses", "", "-x", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "E   " in done.stdout
    assert "assert" in done.stdout


def test_one_that_refuses_everything_has_not_been_checked(run_check: Check, site: Path, tmp_path: Path) -> None:
    done = run_check("schedule_policy", "refuses", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "refuses objects to this: no" in done.stdout
    assert "refuses: no test passed, so nothing was checked" in done.stdout


def test_the_class_of_the_record_is_what_runs(run_check: Check, site: Path, tmp_path: Path) -> None:
    done = run_check("admission_gate", "waits", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads((tmp_path / "report.json").read_text())["providers"]
    assert (entry["class"], entry["verdict"]) == ("admission_gate::TestWaits", "passed")
    passed = {test["name"] for test in entry["tests"] if test["outcome"] == "passed"}
    assert {"test_of_my_own", "test_blocked_until_the_way_is_clear"} <= passed


def test_what_stands_beside_the_class_counts_for_it(run_check: Check, site: Path, tmp_path: Path) -> None:
    """As where pytest collects the module: its fixtures, marks and set-up, but none of its other tests."""
    file = site / "mine_tests.py"
    text = file.read_text().replace("class TestWaits", BESIDE + "\n\nclass TestWaits")
    file.write_text(
        text.replace(
            "(self, gate):\n        words", "(self, gate, numbers):\n        assert numbers == READY\n        words"
        )
    )
    done = run_check("admission_gate", "waits", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads((tmp_path / "report.json").read_text())["providers"]
    assert "test_of_my_own" in {test["name"] for test in entry["tests"] if test["outcome"] == "passed"}
    assert "test_of_another_kind" not in done.stdout
    file.write_text(f"{text}\npytestmark = pytest.mark.skip(reason='not on a Sunday')\n")
    done = run_check("admission_gate", "waits", cwd=tmp_path)
    assert done.returncode == 1
    assert "not on a Sunday" in done.stdout


def test_a_failing_test_of_the_authors_is_explained(run_check: Check, site: Path, tmp_path: Path) -> None:
    file = site / "mine_tests.py"
    file.write_text(file.read_text().replace('"mine" in words', '"yours" in words'))
    done = run_check("admission_gate", "waits", cwd=tmp_path)
    assert done.returncode == 1
    assert "assert 'yours' in ['mine', 'too']" in done.stdout


def test_one_that_hardly_anything_ran_on_says_so(run_check: Check, site: Path, tmp_path: Path) -> None:
    done = run_check("admission_gate", "bare", "report.json", cwd=tmp_path)
    assert done.returncode == check.HARDLY_TESTED, done.stdout + done.stderr
    (entry,) = json.loads((tmp_path / "report.json").read_text())["providers"]
    assert entry["verdict"] == "hardly_tested"
    said = f"bare: hardly tested: {entry['counts']['skipped']} of {len(entry['tests'])} skipped"
    assert said in done.stdout
    assert "Provider(conformance=" in done.stdout


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("lost", "conformance='mine_testz:TestWaits' cannot be imported: ModuleNotFoundError: No module named 'mine_"),
        ("foreign", "conformance='mine_tests:TestWaits' tests 'waits': it must say provider = 'foreign'"),
        ("odd", "conformance='mine:Waits' must be a subclass of pegboard.conformance.admission_gate:AdmissionGateCon"),
        ("bad", "bad lazy name 'mine.tests' in conformance"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(
    run_check: Check, site: Path, tmp_path: Path, provider: str, message: str
) -> None:
    done = run_check("admission_gate", provider, cwd=tmp_path)
    assert done.returncode not in (0, check.HARDLY_TESTED)
    assert message in done.stdout + done.stderr
    assert f"admission_gate {provider!r} of plugin 'mine' (mine 1.0)" in done.stdout + done.stderr
    assert done.stdout.count("Traceback") == 0


@pytest.mark.parametrize(
    ("contract", "provider", "message"),
    [
        ("prefix_cash", "radix", "there is no contract 'prefix_cash'; did you mean 'prefix_cache'"),
        ("model_source", "hf", "model_source has no conformance suite yet"),
        ("schedule_policy", "fcsf", "no schedule_policy provider 'fcsf' is installed; did you mean 'fcfs'"),
    ],
)
def test_nothing_to_check(contract: str, provider: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        check.run(contract, provider)


def test_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "hypothesis" else name)
    with pytest.raises(PluginError, match="pip install hypothesis"):
        check.run("schedule_policy", "fcfs")
