"""``pegboard config show|schema|check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pegboard.core.cli.config import ApiKey, Files, Host, Json, Overrides, Port, ServedName, composed
from pegboard.toolkit.system.output import note, write, write_json, write_table

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig

app = typer.Typer(no_args_is_help=True, help="Show or check a config, without starting anything.")


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
    """Print the resolved config: every value and its origin."""
    from pegboard.core.config.problems import shown
    from pegboard.tools.config.describe import show as describe

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
    """Report all errors of a config, of the plugins that it chooses and of the files that it names; exit 0 if there are
    none.
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
    from pegboard.tools.config.files import check_files

    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    import_chosen(resolved)
    return check_files(resolved, hooks)


def _warn(resolved: ResolvedConfig) -> None:
    for warning in resolved.warnings:
        note(f"warning: {warning}")


@app.command()
def schema() -> None:
    """Print the JSON schema of configs, with the options of every installed provider."""
    from pegboard.core.registry.registry import Registry
    from pegboard.tools.config.schema import schema as describe

    write_json(describe(Registry.discover()))
