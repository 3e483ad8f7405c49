"""Dataclasses of options become options of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from pegboard.tools.option_groups import with_option_groups


@dataclass(frozen=True)
class Lengths:
    """A group."""

    width: Annotated[int, typer.Option(min=1, help="How wide.")]
    depth: Annotated[int, typer.Option("--deep", help="How deep.")] = 2


@dataclass(frozen=True)
class Boxes(Lengths):
    """A group that has another one's options."""

    labels: Annotated[list[str] | None, typer.Option("--label")] = None


@pytest.fixture
def app() -> typer.Typer:
    found = typer.Typer()

    @found.command()
    @with_option_groups
    def pack(*, name: Annotated[str, typer.Argument()] = "box", boxes: Boxes, loud: bool = False) -> None:
        """Pack boxes."""
        typer.echo(f"{name} {boxes} {loud}")

    return found


def test_a_command_gets_its_groups(app: typer.Typer) -> None:
    given = CliRunner().invoke(app, ["crate", "--width", "3", "--label", "a", "--label", "b", "--loud"])
    assert given.stdout == "crate Boxes(width=3, depth=2, labels=['a', 'b']) True\n"
    given = CliRunner().invoke(app, ["--width", "3", "--deep", "7"])
    assert given.stdout == "box Boxes(width=3, depth=7, labels=None) False\n"


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "Missing option '--width'"), (["--width", "0"], "Invalid value for '--width'")]
)
def test_options_keep_their_rules(app: typer.Typer, arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_the_help_lists_options_in_their_place(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    places = [shown.index(text) for text in ("Pack boxes.", "--width", "How wide.", "--deep", "--label", "--loud")]
    assert places == sorted(places)
    assert "--boxes" not in shown
