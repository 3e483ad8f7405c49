"""``pegboard config show|schema|check``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.cli.output import note, write, write_json, write_table

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig

app = typer.Typer(no_args_is_help=True, help="Look at a config without starting anything.")

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|FILE",
        help="The model (a directory, hub id, GGUF file or demo:NAME), and config files (YAML, TOML, JSON), merged in "
        "order.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as server.port=31000.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on: server.host.", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port to listen on: server.port.", show_default=False)]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(help="Key that requests must bring, visible to other users of this machine: server.api_key."),
]
ServedName = Annotated[list[str] | None, typer.Option(help="Name under which APIs offer the model: model.served_name.")]


def composed(
    files: Sequence[str] | None,
    overrides: Sequence[str] | None,
    host: str | None = None,
    port: int | None = None,
    api_key: Sequence[str] | None = None,
    served_name: Sequence[str] | None = None,
) -> ResolvedConfig:
    """Return the config of a command's arguments. Raises ConfigError and PluginError."""
    from pegboard.core.config.arguments import read_options
    from pegboard.core.config.compose import compose

    options = (
        ("--host", "server.host", host),
        ("--port", "server.port", port),
        ("--api-key", "server.api_key", list(api_key) if api_key else None),
        ("--served-name", "model.served_name", list(served_name) if served_name else None),
    )
    return compose(files or (), overrides=overrides or (), options=[read_options(options)])


@app.command()
def show(
    files: Files = None,
    overrides: Overrides = None,
    host: Host = None,
    port: Port = None,
    api_key: ApiKey = None,
    served_name: ServedName = None,
    as_json: Json = False,
) -> None:
    """Print the resolved config: every value, and where it came from."""
    from pegboard.core.config.describe import show as describe
    from pegboard.core.config.problems import shown

    resolved = composed(files, overrides, host, port, api_key, served_name)
    _warn(resolved)
    values = describe(resolved)
    if as_json:
        keys = ("path", "value", "origin", "note")
        write_json([{key: getattr(one, key) for key in keys} for one in values])
        return
    rows = [(one.path, "unset" if one.value is None else shown(one.value), one.origin, one.note) for one in values]
    write_table(("key", "value", "from", ""), rows)


@app.command()
def check(
    files: Files = None,
    overrides: Overrides = None,
    host: Host = None,
    port: Port = None,
    api_key: ApiKey = None,
    served_name: ServedName = None,
    as_json: Json = False,
) -> None:
    """Say everything that is wrong with a config, with the plugins that it chooses and the files that it names; exit 0
    if nothing is.
    """
    from pegboard.core.config.early import problems_of
    from pegboard.core.interfaces.errors import ConfigError, PluginError

    problems = []
    try:
        resolved = composed(files, overrides, host, port, api_key, served_name)
        _warn(resolved)
        left_out = _check(resolved)
    except (ConfigError, PluginError) as error:
        if not as_json:
            raise
        left_out = []
        problems = [
            {"path": problem.path, "message": problem.message, "origin": problem.origin}
            for problem in problems_of(error)
        ]
    if as_json:
        write_json({"ok": not problems, "problems": problems, "not_checked": left_out})
    else:
        write(f"ok (not checked: {', '.join(left_out)})")
    if problems:
        raise typer.Exit(2)


def _check(resolved: ResolvedConfig) -> list[str]:
    """Return what was not looked at. Raises ConfigError and PluginError."""
    from pegboard.core.config.early import import_chosen
    from pegboard.core.registry.hooks import Hooks
    from pegboard.core.server.files import check_files

    Hooks.load(resolved.registry, resolved.plugin_options)
    import_chosen(resolved)
    return check_files(resolved)


def _warn(resolved: ResolvedConfig) -> None:
    for warning in resolved.warnings:
        note(f"warning: {warning}")


@app.command()
def schema() -> None:
    """Print the JSON schema of configs, with the options of every installed provider."""
    from pegboard.core.config.schema import schema as describe
    from pegboard.core.registry.registry import Registry

    write_json(describe(Registry.discover()))
