"""``pegboard chat``: talk to a model, in this process or on a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.config import Files, Overrides
from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.output import quiet_logging, spinner
from pegboard.tools.option_groups import with_option_groups

if TYPE_CHECKING:
    from pegboard.tools.chat.backends import Speaker
    from pegboard.tools.chat.terminal import Terminal

STOPPED = 130
"""Exit code where Ctrl-C ended it, as shells have it."""


@dataclass(frozen=True)
class ServerOptions:
    """The server to talk to, if any."""

    url: Annotated[
        str, typer.Option(help="Talk to a running server with OpenAI's API, such as http://127.0.0.1:30000.")
    ] = ""
    api_key: Annotated[
        str, typer.Option(help="The server's API key.", envvar="PEGBOARD_API_KEY", show_default=False)
    ] = ""
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key in its first line.", show_default=False)
    ] = None
    model: Annotated[str, typer.Option(help="The server's model to use; by default its first.")] = ""

    def check(self, *, has_config: bool) -> None:
        """Raise PegboardError for a config beside a server, and for options that need --url."""
        if self.url and has_config:
            raise PegboardError(
                "--url talks to a server, which has a config of its own; leave config files and --set out"
            )
        if not self.url and (self.api_key_file or self.model):
            raise PegboardError(f"{'--model' if self.model else '--api-key-file'} goes with --url")

    @property
    def key(self) -> str:
        """The API key, from the file if one is named. Raises PegboardError where it cannot be read."""
        if self.api_key_file is None:
            return self.api_key.strip()
        try:
            lines = self.api_key_file.read_text("utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise PegboardError(f"--api-key-file: {self.api_key_file} cannot be read: {error}") from None
        return lines[0].strip()


@with_option_groups
def chat(
    *,
    files: Files = None,
    overrides: Overrides = None,
    server: ServerOptions,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of an answer; by default until the context is full.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--setting", metavar="NAME=VALUE", help="As /set: top_p, stop, seed, ..."),
    ] = None,
    load: Annotated[Path | None, typer.Option(help="Continue a conversation that /save has written.")] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep what you type for the arrow keys of later chats.")
    ] = True,
) -> None:
    """Chat with a model: in this process, or on a server with --url.

    Type /help for the commands. In a pipe every input line is a message, and only answers are printed.
    """
    chosen = _settings(temperature, max_tokens, settings or ())
    server.check(has_config=bool(files or overrides))
    try:
        speaker = _server(server) if server.url else _engine(files, overrides)
        with contextlib.closing(speaker), contextlib.closing(_terminal(keep=history)) as terminal:
            code = _converse(speaker, terminal, system, chosen, load, server.url)
    except KeyboardInterrupt:
        code = STOPPED
    raise typer.Exit(code)


def _settings(temperature: float, max_tokens: int | None, further: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a chat by name; `further` are NAME=VALUE. Raise PegboardError for a wrong one."""
    from pegboard.tools.chat.session import parse_setting

    given = {"temperature": temperature} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    chosen = {name: parse_setting(name, str(value)) for name, value in given.items()}
    for text in further:
        name, _, value = text.partition("=")
        chosen[name] = parse_setting(name, value)
    return chosen


def _converse(
    speaker: Speaker, terminal: Terminal, system: str, settings: Mapping[str, Any], load: Path | None, url: str
) -> int:
    """Talk until the end; return the exit code."""
    from pegboard.tools.chat.session import Session

    session = Session(speaker, terminal, system=system, settings=settings)
    if load is not None:
        session.load(str(load))
    _talk(session.handle, terminal, f"{speaker.name}{f' at {url}' if url else ''}")
    return 1 if session.failed and not terminal.interactive else 0


def _talk(handle: Callable[[str], bool], terminal: Terminal, whom: str) -> None:
    """Until there is nothing more to say. Ctrl-C does not end a chat on a terminal."""
    if terminal.interactive:
        terminal.note(f"{whom} - /help lists the commands, Ctrl-D ends")
    going = True
    while going:
        try:
            going = handle(terminal.read())
        except EOFError:
            return
        except KeyboardInterrupt:
            if not terminal.interactive:
                raise
            terminal.note("(Ctrl-D or /quit ends the chat)")


def _terminal(*, keep: bool) -> Terminal:
    from pegboard.toolkit.system.cache_dir import default_cache_dir
    from pegboard.tools.chat.session import COMMANDS
    from pegboard.tools.chat.terminal import Terminal

    history = default_cache_dir() / "chat_history" if keep else None
    return Terminal(history=history, commands=[f"/{name}" for name in (*COMMANDS, "quit")])


def _server(options: ServerOptions) -> Speaker:
    from pegboard.tools.chat.backends import ServerSpeaker
    from pegboard.tools.chat.server_client import ServerClient

    client, model = ServerClient(options.url, options.key), options.model
    models = client.models(wait=lambda: spinner(f"{client.url} is loading its model ..."))
    if model and model not in models:
        raise PegboardError(f"--model: {client.url} has no {model!r}; it has {', '.join(models) or 'none'}")
    if not models:
        raise PegboardError(f"{client.url} has no model")
    return ServerSpeaker(client, model or models[0])


def _engine(files: list[str] | None, overrides: list[str] | None) -> Speaker:
    from pegboard.core.config.compose import compose
    from pegboard.tools.chat.backends import EngineSpeaker

    resolved = compose(files or (), overrides=overrides or ())
    quiet_logging(resolved.engine.log_level)
    with spinner(f"Loading {resolved.engine.model.path} ..."):
        from pegboard.core.engine.engine import Engine

        engine = Engine(resolved)
        try:
            return EngineSpeaker(engine)
        except BaseException:
            engine.close()
            raise
