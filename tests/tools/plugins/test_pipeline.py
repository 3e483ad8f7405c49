"""`plugins pipeline`: who takes part where, in the order of the calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from pegboard.core.cli.main import app
from pegboard.core.interfaces.hooks import POINTS

ROOT = Path(__file__).parents[3]
QUICKSTART = "examples/quickstart.yaml"
HOOKS = """
from pegboard.core.interfaces.hooks import hookimpl

class Late:
    @hookimpl(trylast=True)
    def idle(self): ...
    @hookimpl
    def configure(self): ...

class Soon:
    @hookimpl
    def idle(self): ...
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plugins", "pipeline", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_architecture_shows_the_quickstarts() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    shown = text.partition(f"$ pegboard plugins pipeline {QUICKSTART}\n")[2].partition("```")[0]
    assert shown == run(str(ROOT / QUICKSTART)), "docs/architecture.md, 'Hooks': replace the output"


def test_who_takes_part_is_told_in_the_order_of_the_calls(site: Any) -> None:
    record = site.plugin("acme").replace("providers=()", "hooks=('acme_gates_acme:Late', 'acme_gates_acme:Soon')")
    site.install("acme-gates", "2.1", acme=record + HOOKS)
    base = [str(ROOT / QUICKSTART), "--json"]
    off = {one["point"]: one for one in json.loads(run(*base))}
    points = {one["point"]: one for one in json.loads(run(*base, "--set", "plugins.acme=true"))}
    assert [*points][: len(POINTS)] == [one.name for one in POINTS]
    assert [one["plugin"] for one in points["Stage.pack"]["listeners"]] == ["row_outputs"]
    assert points["Stage.clip"]["listeners"] == []
    assert [one["name"] for one in points["idle"]["listeners"]] == ["acme_gates_acme:Soon", "acme_gates_acme:Late"]
    assert [one["plugin"] for one in points["configure"]["listeners"]][-1] == "acme"
    assert off["idle"] == {**points["idle"], "listeners": []}
    assert points["batch_committed"]["cost"] == "one truth test per step"
