"""``pegboard chat``: talk to a model, in this process or on a server."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.commands.config import Files, Overrides
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError

if TYPE_CHECKING:
    from pegboard.core.commands.speakers import Message, Speaker

DIM, PLAIN = "\033[2m", "\033[0m"

HELP = """\
/reset            forget the conversation (the system message stays)
/system [TEXT]    set the system message; without TEXT remove it
/stats            what the last answer and all of them took
/retry            answer the last question again
/undo             forget the last question and its answer
/set NAME VALUE   temperature, top_p, top_k, seed or max_tokens; without VALUE the default
/save FILE        write the conversation to a JSON file
/load FILE        go on with such a file
/quit             end (or Ctrl-D)
A question may have several lines: end a line with \\, or begin with three quotes and end with them.
Ctrl-C stops an answer; what it has said by then stays in the conversation."""

_NUMBERS: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "seed": int, "max_tokens": int}


class Conversation:
    """The history, and what the commands do with it. `show` writes text as it is; `notice` a line of its own."""

    def __init__(
        self,
        speaker: Speaker,
        *,
        system: str = "",
        params: dict[str, Any] | None = None,
        show: Callable[[str], None],
        notice: Callable[[str], None],
        dim: Callable[[str], str] = lambda text: text,
    ) -> None:
        self.messages: list[Message] = []
        self.system = system
        self.params = dict(params or {})
        self._speaker = speaker
        self._show = show
        self._notice = notice
        self._dim = dim
        self._last: Any = None
        self._total = [0, 0, 0]

    def handle(self, line: str) -> bool:
        """Answer a question, or do what a command says. False when the conversation is over."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.ask(line)
            return True
        name, _, rest = line[1:].partition(" ")
        command = getattr(self, f"_do_{name}", None)
        if name == "quit" or name == "exit":
            return False
        if command is None:
            self._notice(f"there is no /{name}; /help lists what there is")
        else:
            command(rest.strip())
        return True

    def ask(self, question: str) -> None:
        """Stream the answer. What went wrong is told, and the question is taken back then."""
        self.messages.append({"role": "user", "content": question})
        said: list[str] = []
        asked = [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]
        try:
            answer = self._speaker.answer(asked, self.params)
            self._last = answer.figures
            with contextlib.closing(answer.pieces):  # type: ignore[type-var]  # it is a generator
                for piece in answer.pieces:
                    if piece.reasoning:
                        self._show(self._dim(piece.text))
                    else:
                        said.append(piece.text)
                        self._show(piece.text)
        except KeyboardInterrupt:
            self._notice("\n(stopped)")
        except PegboardError as error:
            self._notice(("\n" if said else "") + _explained(error))
            if not said:
                self.messages.pop()
                return
        else:
            self._show("\n")
            if self._last.finish_reason == "length" and "max_tokens" not in self.params:
                self._notice("(the context is full: /reset, or /undo some turns)")
        if self._last is not None:
            figures = self._last
            self._total = [
                old + new for old, new in zip(self._total, (1, figures.prompt_tokens, figures.new_tokens), strict=True)
            ]
        self.messages.append({"role": "assistant", "content": "".join(said)})

    def _do_help(self, rest: str) -> None:
        self._notice(HELP)

    def _do_reset(self, rest: str) -> None:
        self.messages.clear()
        self._notice("the conversation begins anew")

    def _do_system(self, rest: str) -> None:
        self.system = rest
        self._notice("the system message is set" if rest else "there is no system message now")

    def _do_stats(self, rest: str) -> None:
        if self._last is None:
            self._notice("nothing was answered yet")
            return
        answers, prompt, new = self._total
        self._notice(f"last: {self._last}\nall {answers}: {prompt} prompt tokens, {new} new")

    def _do_undo(self, rest: str) -> None:
        if not self.messages:
            self._notice("there is nothing to forget")
            return
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        self._notice(f"forgotten; {len(self.messages)} messages are left")

    def _do_retry(self, rest: str) -> None:
        question = next((one["content"] for one in reversed(self.messages) if one["role"] == "user"), None)
        if question is None:
            self._notice("nothing was asked yet")
            return
        while self.messages.pop()["role"] != "user":
            pass
        self.ask(question)

    def _do_set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name not in _NUMBERS:
            self._notice(f"/set takes {', '.join(_NUMBERS)}")
        elif not value.strip():
            self.params.pop(name, None)
            self._notice(f"{name} is the default")
        else:
            try:
                self.params[name] = _NUMBERS[name](value)
            except ValueError:
                self._notice(f"{value.strip()!r} is no number")
            else:
                self._notice(f"{name} is {self.params[name]}")

    def _do_save(self, rest: str) -> None:
        if not rest:
            self._notice("/save FILE")
            return
        data = {"system": self.system, "messages": self.messages}
        try:
            Path(rest).expanduser().write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            self._notice(f"{rest} cannot be written: {error.strerror}")
        else:
            self._notice(f"saved to {rest}")

    def _do_load(self, rest: str) -> None:
        try:
            data = json.loads(Path(rest).expanduser().read_text("utf-8"))
            messages = data["messages"]
            if not all(isinstance(one["role"], str) and isinstance(one["content"], str) for one in messages):
                raise TypeError
            self.system, self.messages = str(data.get("system", "")), list(messages)
        except OSError as error:
            self._notice(f"{rest or 'the file'} cannot be read: {error.strerror}")
        except (ValueError, KeyError, TypeError):
            self._notice(f"{rest} is no saved conversation")
        else:
            self._notice(f"{len(self.messages)} messages")


def _explained(error: PegboardError) -> str:
    if isinstance(error, InvalidRequest) and error.code == "context_length_exceeded":
        return "the conversation no longer fits into the context: /reset, or /undo some turns"
    return f"error: {error}"


def chat(
    files: Files = None,
    overrides: Overrides = None,
    url: Annotated[str, typer.Option(help="A running server, such as http://127.0.0.1:30000.")] = "",
    api_key: Annotated[str, typer.Option(help="Its API key.", envvar="PEGBOARD_API_KEY", show_default=False)] = "",
    model: Annotated[str, typer.Option(help="Its model; by default the first that it has.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
) -> None:
    """Talk to a model, in this process or on a server. /help inside lists the commands."""
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    params = {name: value for name, value in given.items() if value is not None}
    speaker = _server(url, api_key, model, files) if url else _engine(files, overrides)
    try:
        _talk(speaker, system, params)
    finally:
        speaker.close()


def _server(url: str, api_key: str, model: str, files: list[Path] | None) -> Speaker:
    from pegboard.core.commands.speakers import ServerSpeaker

    if files:
        raise PegboardError("--url talks to a server, which has a config of its own; leave the config files out")
    return ServerSpeaker(url, api_key, model)


def _engine(files: list[Path] | None, overrides: list[str] | None) -> Speaker:
    import logging

    from pegboard.core.commands.speakers import EngineSpeaker
    from pegboard.core.compose import compose

    resolved = compose(files or (), overrides=overrides or ())
    level = resolved.engine.log_level
    logging.basicConfig(level="WARNING" if level == "info" else level.upper(), stream=sys.stderr)
    with _waiting(f"Loading {resolved.engine.model.path} ..."):
        from pegboard.core.engine import Engine

        return EngineSpeaker(Engine(resolved))


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _talk(speaker: Speaker, system: str, params: dict[str, Any]) -> None:
    """Questions from the terminal, or from a pipe, until they end."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    colours = terminal and not os.environ.get("NO_COLOR")

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def notice(text: str) -> None:
        # Not among the answers, where those go into a pipe.
        stream = sys.stdout if terminal else sys.stderr
        stream.write(f"{text}\n")
        stream.flush()

    conversation = Conversation(
        speaker,
        system=system,
        params=params,
        show=show,
        notice=notice,
        dim=lambda text: f"{DIM}{text}{PLAIN}" if colours else text,
    )
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
        notice(f"{speaker.name}. /help lists the commands, Ctrl-D ends.")
    while True:
        try:
            line = read_question("> " if terminal else "")
        except EOFError:
            if terminal:
                notice("")
            return
        except KeyboardInterrupt:
            notice("\n(Ctrl-D ends)")
            continue
        if not conversation.handle(line):
            return


def read_question(prompt: str) -> str:
    """One question: a line, with what follows a backslash at its end, or all between two lines of three quotes. Raises
    EOFError at the end of the input.
    """
    line = input(prompt)
    more = "." * len(prompt.rstrip()) + " " if prompt else ""
    for quotes in ('"""', "'''", "```"):
        if line.strip() == quotes:
            lines = []
            with contextlib.suppress(EOFError):
                while (line := input(more)).strip() != quotes:
                    lines.append(line)
            return "\n".join(lines)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = input(more)
        except EOFError:
            line = ""
    return "\n".join([*lines, line])
