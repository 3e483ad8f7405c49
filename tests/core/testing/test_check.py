"""A check with no test file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.testing import check

PROGRAM = """
import sys
from pathlib import Path
from pegboard.core.testing.check import run
sys.exit(run(*sys.argv[1:3], report=Path(sys.argv[3]) if sys.argv[3:] else None))
"""


def run_check(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *args], cwd=cwd, capture_output=True, text=True, env={**os.environ}, check=False
    )


def test_a_built_in(tmp_path: Path) -> None:
    done = run_check("schedule_policy", "fcfs", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fcfs does not declare the capability schedule_policy.cache_aware" in done.stdout
    assert "warning" not in done.stdout
    (entry,) = json.loads((tmp_path / "report.json").read_text())["providers"]
    assert (entry["provider"], entry["plugin"], entry["verdict"]) == ("fcfs", "policy_basic", "passed")
    assert entry["class"].endswith("schedule_policy::fcfs")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "a check leaves nothing behind"


SITE = {
    "mine.py": """
from pegboard.core.interfaces import Plugin, Provider, SchedulePolicy

class Loses(SchedulePolicy):
    def order(self, waiting, running):
        return list(waiting)[1:]

class Refuses(SchedulePolicy):
    @classmethod
    def supports(cls, options, ctx):
        return "no"
    def order(self, waiting, running):
        return list(waiting)

plugin = Plugin("mine", "1", (
    Provider("schedule_policy", "loses", "mine:Loses", "loses requests"),
    Provider("schedule_policy", "refuses", "mine:Refuses", "works nowhere"),
))
""",
    "mine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
    "mine-1.0.dist-info/entry_points.txt": "[pegboard]\nmine = mine:plugin\n",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks as if a distribution was installed into it, on the path of child processes."""
    folder = tmp_path / "site"
    for name, text in SITE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_a_broken_one_fails_and_says_why(site: Path, tmp_path: Path) -> None:
    done = run_check("schedule_policy", "loses", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "E   " in done.stdout
    assert "assert" in done.stdout


def test_one_that_refuses_everything_has_not_been_checked(site: Path, tmp_path: Path) -> None:
    done = run_check("schedule_policy", "refuses", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "refuses objects to this: no" in done.stdout
    assert "refuses: no test passed, so nothing was checked" in done.stdout


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
