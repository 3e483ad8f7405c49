"""The command line. Everything heavy is imported by the command that needs it, so that `--help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pegboard.core.commands import config, plugins, simulate
from pegboard.core.commands.config import Files, Json, Overrides
from pegboard.core.commands.output import write, write_json
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.version import __version__

app = typer.Typer(
    name="pegboard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve language models; every feature is a plugin.",
)
app.add_typer(config.app, name="config")
app.add_typer(plugins.app, name="plugins")
app.command()(simulate.simulate)


def main() -> None:
    """Entry point of the script. A PegboardError is the user's to solve: its message is shown, exit code 2."""
    try:
        app()
    except PegboardError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


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


@app.command()
def serve(files: Files = None, overrides: Overrides = None) -> None:
    """Start the server."""
    from pegboard.core.compose import compose

    resolved = compose(files or (), overrides=overrides or ())
    from pegboard.core.server import serve as start

    start(resolved)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, as raw text.")],
    files: Files = None,
    overrides: Overrides = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt in this process, without a server."""
    import logging

    from pegboard.core.compose import compose

    resolved = compose(files or (), overrides=overrides or ())
    from pegboard.core.engine import Engine
    from pegboard.core.interfaces.sampling import SamplingParams

    # Who asks one question wants its answer; what was chosen to give it is told at `log_level: debug` only.
    level = resolved.engine.log_level
    logging.basicConfig(level="WARNING" if level == "info" else level.upper(), stream=sys.stderr)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    with Engine(resolved) as engine:
        text = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
        output = engine.generate(text, sampling, add_special_tokens=not chat)
    if not as_json:
        write(output.text)
        return
    write_json(
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.cached_tokens,
        }
    )


if __name__ == "__main__":
    main()
