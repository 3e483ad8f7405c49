"""``pegboard generate``: answers in this process, without a server: to one prompt, or to a file of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.commands.config import Json, Overrides
from pegboard.core.commands.output import write, write_json
from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from pegboard.core.engine import Engine


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt, as raw text; with --file a config file.")] = None,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Config files (YAML, TOML, JSON), merged in order.")
    ] = None,
    overrides: Overrides = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability to draw from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens to draw from; -1 is all.")] = -1,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts into the model's chat template.")] = False,
    system: Annotated[str, typer.Option(help="System message of chats.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(help='Answer a file: a JSON object per line with "prompt" or "messages"; - reads stdin.'),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers to --file go, a JSON object per line.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an output file ends.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start an output file anew.")] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Answer bad lines with an error instead of stopping at once.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, or a whole file of them, in this process.

    A run over a file may be stopped (Ctrl-C) and continued with --resume.
    """
    from pegboard.core.compose import compose

    paths = list(files or ())
    if file is not None and prompt is not None:
        paths.insert(0, Path(prompt))
    if file is None and prompt is None:
        raise PegboardError("what to answer? Give a prompt, or a file of them with --file")
    if file is not None and output is None:
        raise PegboardError("--file needs --output: where the answers go")
    if file is None and (output is not None or resume or overwrite or skip_bad_lines):
        raise PegboardError("--output, --resume, --overwrite and --skip-bad-lines go with --file")
    resolved = compose(paths, overrides=overrides or ())

    def make_engine() -> Engine:
        from pegboard.core.engine import Engine

        return Engine(resolved)

    _quieten(resolved.engine.log_level)
    from pegboard.core.interfaces.sampling import SamplingParams

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    sampling.validate()
    if file is not None:
        from pegboard.core.commands.batch import run_batch

        assert output is not None
        code = run_batch(
            make_engine,
            file,
            output,
            sampling,
            chat=chat,
            system=system,
            resume=resume,
            overwrite=overwrite,
            skip_bad=skip_bad_lines,
        )
        raise typer.Exit(code)
    assert prompt is not None
    text = prompt
    with make_engine() as engine:
        if chat:
            messages = [{"role": "system", "content": system}] if system else []
            text = engine.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])
        answer = engine.generate(text, sampling, add_special_tokens=not chat)
    if not as_json:
        write(answer.text)
        return
    write_json(
        {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
        }
    )


def _quieten(level: str) -> None:
    """Who asks one question wants its answer; what was chosen to give it is told at `log_level: debug` only."""
    import logging

    logging.basicConfig(level="WARNING" if level == "info" else level.upper(), stream=sys.stderr)
