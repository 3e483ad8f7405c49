"""Options and arguments that commands share: a model, config files, and what is laid over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig

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
    typer.Option(help="Key that requests must have; other users of this machine can read it: server.api_key."),
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
