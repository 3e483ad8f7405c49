"""Commands that entry points bring: found, listed, grouped, and harmless when they are broken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pegboard.core.cli.commands import COMMAND_GROUP
from pegboard.core.cli.main import app
from pegboard.core.interfaces.errors import PluginError

HELLO = "def hello(name: str = 'you') -> None:\n    'Greet.'\n    print('hello', name)\n"
APP = """
import typer
app = typer.Typer(help="Two of them.")

@app.command()
def one() -> None:
    print("one!")

@app.command()
def two() -> None:
    print("two!")
"""


class Folder:
    """Distributions with commands on sys.path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modules: list[str] = []

    def install(self, distribution: str, source: str, **commands: str) -> None:
        """Write a distribution with one module; `commands` are entry points, "__" in their names standing for a dot."""
        info = self.path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        points = [f"{name.replace('__', '.')} = {distribution}_module:{value}" for name, value in commands.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{COMMAND_GROUP}]", *points]))
        (self.path / f"{distribution}_module.py").write_text(source)
        self.modules.append(f"{distribution}_module")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Folder(tmp_path)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_function_is_a_command(folder: Folder) -> None:
    folder.install("acme", HELLO, hello="hello")
    assert run("hello", "--name", "me") == "hello me\n"
    assert "Greet." in run("--help")


def test_an_app_is_a_group_of_commands(folder: Folder) -> None:
    folder.install("acme", APP, acme="app")
    assert run("acme", "two") == "two!\n"
    assert "--install-completion" not in run("acme", "--help")


def test_a_dot_leads_into_a_group(folder: Folder) -> None:
    folder.install("acme", HELLO, plugins__hello="hello")
    assert run("plugins", "hello") == "hello you\n"
    assert "Greet." in run("plugins", "--help")
    assert "Greet." not in run("--help")


def test_nothing_is_imported_for_another_command(folder: Folder) -> None:
    folder.install("acme", HELLO, hello="hello")
    assert run("config", "--help")
    assert "acme_module" not in sys.modules


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("hello = 3", "must be a function or a typer.Typer, not int"),
        ("", "has no attribute 'hello'"),
    ],
)
def test_a_broken_command_harms_no_other(folder: Folder, source: str, reason: str) -> None:
    folder.install("acme", source, hello="hello")
    assert "Cannot be loaded" in run("--help")
    assert run("config", "--help")
    with pytest.raises(PluginError, match="the command 'hello' cannot be loaded: ") as caught:
        run("hello", "--any", "argument")
    assert reason in str(caught.value)
    assert "acme 1.0" in str(caught.value)


def test_two_of_one_name_are_refused(folder: Folder) -> None:
    folder.install("acme", HELLO, hello="hello")
    folder.install("zeta", HELLO, hello="hello")
    with pytest.raises(PluginError, match=r"acme 1\.0 and by zeta 1\.0; uninstall all but one"):
        run("hello")


def test_a_command_of_ours_cannot_be_replaced(folder: Folder) -> None:
    folder.install("acme", HELLO, serve="hello", simulate="hello")
    assert "Start the server." in run("serve", "--help")
    assert "virtual time" in run("simulate", "--help")


def test_a_near_miss_is_suggested(folder: Folder) -> None:
    folder.install("acme", HELLO, hello="hello")
    assert "'hello'" in run("helo")
