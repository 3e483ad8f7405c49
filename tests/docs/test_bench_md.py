"""The page on measuring: its commands parse, its options exist, and it names all that the JSON holds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pegboard.core.cli.main import app
from pegboard.tools.bench.apis import APIS
from pegboard.tools.bench.figures import PERCENTILES, figures, spread
from pegboard.tools.bench.find_rate import Trial
from pegboard.tools.bench.load import Outcome
from pegboard.tools.bench.options import WorkloadName
from pegboard.tools.bench.records import Record
from pegboard.tools.bench.report import FORMAT
from pegboard.tools.bench.step import ENCODE, STAGES, StepMode, Steps
from pegboard.tools.bench.target import TOKEN_RANGE
from tests.docs.test_docs import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text("utf-8")


def commands() -> dict[str, Any]:
    root: Any = get_command(app)
    found: dict[str, Any] = root.get_command(None, "bench").commands
    return found


@pytest.mark.parametrize(
    "line", [line[2:] for text in blocks(PAGE, "console") for line in text.splitlines() if line.startswith("$ ")]
)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line)
    assert words[:2] == ["pegboard", "bench"]
    commands()[words[2]].make_context(words[2], words[3:])


def test_options_exist() -> None:
    known = {
        name for one in commands().values() for option in one.params for name in (*option.opts, *option.secondary_opts)
    }
    assert not sorted(set(re.findall(r"--[a-z][a-z-]*", PAGE)) - known)


def test_every_option_of_serve_is_told_of() -> None:
    for option in commands()["serve"].params:
        # What a workload's lengths and the plainest things are called says enough.
        if option.name not in ("model", "temperature", "help", "num_prompts"):
            assert any(name in PAGE for name in (*option.opts, *option.secondary_opts)), option.name


def named(*names: str) -> list[str]:
    return [name for name in names if f"`{name}`" not in PAGE]


def test_all_that_the_json_holds_is_named() -> None:
    run = figures(Outcome(1, [], 0.0, 1.0))
    assert not named(*run, *run["client"])
    assert not named(*(spread([1.0]) or ()))
    assert not named(*Record(0, error="x").to_dict(0.0))
    steps = Steps(tokens=1)
    steps.add(dict.fromkeys((*STAGES, ENCODE), 1.0), {})
    assert not named(*(name for name in steps.figures() if name != "tokens"))
    assert not named("why", *(f"p{p}" for p in PERCENTILES))
    assert {"rate", "why", "figures"} <= Trial.__annotations__.keys()
    assert f"`format` | {FORMAT};" in PAGE


def test_names_and_numbers_are_those() -> None:
    assert not named(*WorkloadName, "openai-chat", "native")
    assert f"--api {next(iter(APIS))}" in PAGE
    for stage in (*STAGES, ENCODE):
        assert f"| {stage} |" in PAGE
    assert f"({TOKEN_RANGE[0]} to {TOKEN_RANGE[1] - 1};" in PAGE
    assert StepMode.__args__ == ("decode", "prefill", "mixed")  # type: ignore[attr-defined]
