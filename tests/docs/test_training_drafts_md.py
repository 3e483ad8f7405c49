"""The page on training heads: its commands parse, its options exist, and it tells of all that matter."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pegboard.core.cli.main import app
from pegboard.tools.train_draft.prompts import built_in
from pegboard.tools.train_draft.settings import MAX_TTT, TOPS
from tests.docs.test_docs import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "training-drafts.md").read_text("utf-8")


def command() -> Any:
    root: Any = get_command(app)
    return root.get_command(None, "train-draft")


@pytest.mark.parametrize(
    "line", [line[2:] for text in blocks(PAGE, "console") for line in text.splitlines() if "train-draft" in line]
)
def test_commands_parse(line: str) -> None:
    command().make_context("train-draft", shlex.split(line)[2:])


def test_options_exist() -> None:
    known = {name for option in command().params for name in (*option.opts, *option.secondary_opts)}
    assert not sorted(set(re.findall(r"--[a-z][a-z0-9-]*", PAGE)) - known)


def test_numbers_are_those() -> None:
    prose = " ".join(PAGE.split())
    assert f"the {TOPS} likeliest" in prose
    assert f"for how many tokens in a row, at most {MAX_TTT}" in prose
    assert round(len(built_in(0, 1).train), -2) == 4400
