"""The command line. Everything heavy is imported by the command that needs it, so that `--help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pegboard.core import __version__
from pegboard.core.cli.commands import Commands
from pegboard.core.cli.config import ApiKey, Files, Host, Overrides, Port, ServedName, composed
from pegboard.core.interfaces.errors import ConfigError, PegboardError, Temporary
from pegboard.toolkit.system.output import write

app = typer.Typer(
    name="pegboard",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve language models; every feature is a plugin.",
)


def main() -> None:
    """Entry point of the script. Of a PegboardError the message is shown; exit code 2, or 1 where it is Temporary."""
    try:
        app()
    except PegboardError as error:
        sys.stderr.write(f"error: {error}\n")
        if isinstance(error, ConfigError) and any(
            problem.path == "model.path" and not problem.origin for problem in error.problems
        ):
            sys.stderr.write("hint: name a model, such as Qwen/Qwen3-0.6B or a directory, or a config file\n")
        sys.exit(1 if isinstance(error, Temporary) else 2)


def _version(asked: bool) -> None:
    if asked:
        write(f"pegboard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples: pegboard serve Qwen/Qwen3-0.6B --port 8000, pegboard serve server.yaml --set log_level=debug. "
    "Every key of the config can be set with --set: pegboard config show MODEL lists them."
)
def serve(
    files: Files = None,
    overrides: Overrides = None,
    host: Host = None,
    port: Port = None,
    api_key: ApiKey = None,
    served_name: ServedName = None,
) -> None:
    """Start the server."""
    resolved = composed(files, overrides, host, port, api_key, served_name)
    from pegboard.core.server.serve import serve as start

    start(resolved)


if __name__ == "__main__":
    main()
