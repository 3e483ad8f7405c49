"""``pegboard config show|schema|check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pegboard.core.cli.output import write, write_json, write_table

app = typer.Typer(no_args_is_help=True, help="Look at a config without starting anything.")

Files = Annotated[list[Path] | None, typer.Argument(help="Config files (YAML, TOML, JSON), merged in order.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as server.port=31000.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(files: Files = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved config: every value, and where it came from."""
    from pegboard.core.config.compose import compose
    from pegboard.core.config.describe import show as describe
    from pegboard.core.config.problems import shown

    values = describe(compose(files or (), overrides=overrides or ()))
    if as_json:
        keys = ("path", "value", "origin", "note")
        write_json([{key: getattr(one, key) for key in keys} for one in values])
        return
    rows = [(one.path, "unset" if one.value is None else shown(one.value), one.origin, one.note) for one in values]
    write_table(("key", "value", "from", ""), rows)


@app.command()
def check(files: Files = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Say everything that is wrong with a config and with the plugins that it chooses; exit 0 if nothing is."""
    from pegboard.core.config.early import problems_of
    from pegboard.core.interfaces.errors import ConfigError, PluginError

    if not as_json:
        _check(files or [], overrides or [])
        write("ok")
        return
    try:
        _check(files or [], overrides or [])
        problems = []
    except (ConfigError, PluginError) as error:
        found = problems_of(error)
        problems = [{"path": one.path, "message": one.message, "origin": one.origin} for one in found]
    write_json({"ok": not problems, "problems": problems})
    if problems:
        raise typer.Exit(2)


def _check(files: list[Path], overrides: list[str]) -> None:
    from pegboard.core.config.compose import compose
    from pegboard.core.config.early import import_chosen
    from pegboard.core.registry.hooks import Hooks

    resolved = compose(files, overrides=overrides)
    Hooks.load(resolved.registry)
    import_chosen(resolved)


@app.command()
def schema() -> None:
    """Print the JSON schema of configs, with the options of every installed provider."""
    from pegboard.core.config.schema import schema as describe
    from pegboard.core.registry.registry import Registry

    write_json(describe(Registry.discover()))
