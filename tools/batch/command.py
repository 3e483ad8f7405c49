"""``pegboard generate``: answers without a server: to one prompt, or to a file of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.config import Json, Overrides
from pegboard.core.cli.output import note, quiet_logging, spinner, write, write_json
from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from pegboard.core.cli.signals import Signals
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.engine.engine import Engine
    from pegboard.tools.batch.lines import Defaults, PromptFile
    from pegboard.tools.batch.output import Mode, Output

STOPPED = 130
"""Exit code of a run that was stopped, as shells have it for Ctrl-C."""
SHOWN_PROBLEMS = 10

_FILE = "With --file"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; with --file there is none, and config files come first.")
    ] = None,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Config files (YAML, TOML, JSON), merged in order.")
    ] = None,
    overrides: Overrides = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes what is drawn repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be given again.")] = None,
    sampling: Annotated[
        str, typer.Option(metavar="JSON", help="More sampling parameters, such as '{\"min_p\": 0.1}'.")
    ] = "",
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Put prompts into the model's chat template.")] = False,
    system: Annotated[str, typer.Option(help="System message of conversations without one; implies --chat.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(help="Answer a file of prompts, a JSON object per line; - is stdin.", rich_help_panel=_FILE),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where answers go, a JSON object per line; - is stdout.", rich_help_panel=_FILE),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the output of a run that was stopped.", rich_help_panel=_FILE)
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="As --resume; failed requests are tried again.", rich_help_panel=_FILE),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Throw away what is in the output.", rich_help_panel=_FILE)
    ] = False,
    skip_bad_lines: Annotated[
        bool,
        typer.Option(
            "--skip-bad-lines",
            help="Answer bad lines with an error, and do not refuse the file.",
            rich_help_panel=_FILE,
        ),
    ] = False,
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Write answers in the order of the lines.", rich_help_panel=_FILE)
    ] = False,
    window: Annotated[
        int, typer.Option(min=1, help="Most requests that are under way at once.", rich_help_panel=_FILE)
    ] = 512,
    as_json: Json = False,
) -> None:
    """Answer one prompt, or a file of prompts, in this process.

    A run over a file can be stopped with Ctrl-C and continued with --resume.
    """
    given = {"top_p": top_p, "top_k": top_k, "seed": seed, "stop": stop or None}
    values = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    values |= {name: value for name, value in given.items() if value is not None} | _parsed(sampling)
    paths = list(files or ())
    if file is None:
        for flag, used in _file_flags(output, resume, retry_failed, overwrite, skip_bad_lines, keep_order):
            if used:
                raise PegboardError(f"{flag} goes with --file")
        if prompt is None:
            raise PegboardError("there is no prompt; give one, or a file of them with --file")
        _one(_config(paths, overrides), prompt, values, chat=chat or bool(system), system=system, as_json=as_json)
        return
    if prompt is not None:
        paths.insert(0, Path(prompt))
    if output is None:
        raise PegboardError("--file needs --output, which says where the answers go (- is stdout)")
    if overwrite and (resume or retry_failed):
        raise PegboardError("--overwrite starts anew, --resume goes on; they exclude each other")
    if as_json and str(output) == "-":
        raise PegboardError("--json prints the summary where --output - has the answers; choose one")
    mode: Mode = "overwrite" if overwrite else "resume" if resume or retry_failed else "new"
    command = _Command(_config(paths, overrides), values, chat=chat or bool(system), system=system)
    raise typer.Exit(
        command.run(
            file,
            output,
            mode,
            retry_failed=retry_failed,
            skip_bad=skip_bad_lines,
            keep_order=keep_order,
            window=window,
            as_json=as_json,
        )
    )


def _file_flags(*values: Any) -> Iterator[tuple[str, Any]]:
    flags = ("--output", "--resume", "--retry-failed", "--overwrite", "--skip-bad-lines", "--keep-order")
    return zip(flags, values, strict=True)


def _parsed(sampling: str) -> dict[str, Any]:
    try:
        values = json.loads(sampling) if sampling else {}
    except ValueError as error:
        raise PegboardError(f"--sampling: this is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise PegboardError("--sampling must be a JSON object, such as '{\"min_p\": 0.1}'")
    return values


def _config(files: list[Path], overrides: list[str] | None) -> ResolvedConfig:
    from pegboard.core.config.compose import compose

    resolved = compose(files, overrides=overrides or ())
    quiet_logging(resolved.engine.log_level)
    return resolved


def _one(
    resolved: ResolvedConfig, prompt: str, values: dict[str, Any], *, chat: bool, system: str, as_json: bool
) -> None:
    from pegboard.core.engine.engine import Engine
    from pegboard.tools.batch.lines import sampling_of

    sampling = sampling_of(values)
    with Engine(resolved) as engine:
        text = prompt
        if chat:
            messages = [{"role": "system", "content": system}] if system else []
            text = engine.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])
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


class _Command:
    """A run over a file, from the first look at it to the exit code."""

    def __init__(self, resolved: ResolvedConfig, values: dict[str, Any], *, chat: bool, system: str) -> None:
        from pegboard.tools.batch.lines import Defaults, sampling_of

        sampling_of(values)
        self._resolved = resolved
        self._defaults: Defaults = Defaults(values, resolved.engine.model.path, chat, system)

    def run(
        self, file: Path, output: Path, mode: Mode, *, retry_failed: bool, skip_bad: bool, as_json: bool, **options: Any
    ) -> int:
        """The exit code."""
        from pegboard.core.cli.signals import Signals
        from pegboard.tools.batch.lines import PromptFile
        from pegboard.tools.batch.output import Output

        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(Signals())
            try:
                source = stack.enter_context(contextlib.closing(PromptFile(file)))
                results = stack.enter_context(contextlib.closing(Output(output, mode, retry_failed=retry_failed)))
                total, duplicates = self._check(source, results, skip_bad=skip_bad)
                if len(results.done) >= total:
                    note(
                        f"nothing to do: {results.name} has an answer to each of the {total} requests of {source.name}"
                    )
                    return 1 if results.failed else 0
                return self._generate(source, results, total, duplicates, signals, as_json=as_json, **options)
            except KeyboardInterrupt:
                note("stopped before anything was generated")
                return STOPPED

    def _check(self, source: PromptFile, results: Output, *, skip_bad: bool) -> tuple[int, frozenset[int]]:
        """How many requests there are, and on which lines an id comes again. Raises PegboardError for bad lines."""
        from pegboard.tools.batch.lines import BadLine

        seen: dict[str | int, int] = {}
        duplicates: set[int] = set()
        problems: list[str] = []
        total = wrong = 0
        for line in source.lines(self._defaults):
            total += 1
            problem = line.problem if isinstance(line, BadLine) else ""
            if not problem and seen.setdefault(line.id, line.number) != line.number:
                problem = f"the id {line.id!r} is that of line {seen[line.id]} already"
                duplicates.add(line.number)
            if problem:
                wrong += 1
                if len(problems) < SHOWN_PROBLEMS:
                    problems.append(f"{source.name}:{line.number}: {problem}")
            if results.done.get(line.index, line.digest) != line.digest:
                raise PegboardError(
                    f"--resume: {results.name} has the answer to another request than {source.name}:{line.number}: the "
                    "line, the options or the model have changed; go back to what they were, or start anew with "
                    "--overwrite"
                )
        if results.done and max(results.done) >= total:
            raise PegboardError(f"--resume: {results.name} has answers to more requests than {source.name} has")
        if wrong and not skip_bad:
            more = [f"and {wrong - len(problems)} more"] if wrong > len(problems) else []
            raise PegboardError(
                "\n  ".join(
                    [f"{wrong} of {total} lines are wrong (--skip-bad-lines goes on without):", *problems, *more]
                )
            )
        return total, frozenset(duplicates)

    def _generate(
        self,
        source: PromptFile,
        results: Output,
        total: int,
        duplicates: frozenset[int],
        signals: Signals,
        *,
        keep_order: bool,
        window: int,
        as_json: bool,
    ) -> int:
        from pegboard.tools.batch.progress import progress
        from pegboard.tools.batch.run import Run

        done, failed = len(results.done), results.failed
        if keep_order and done and max(results.done) >= done:
            raise PegboardError(f"--keep-order: the answers in {results.name} are not in order; resume without it")
        if done:
            note(f"{done} of {total} requests are answered in {results.name}; going on with the rest")
        with self._engine() as engine:
            results.begin()
            run = Run(engine, source.lines(self._defaults, duplicates), results, window=window, in_order=keep_order)
            signals.gentle()
            try:
                with progress(total, done) as watcher:
                    run.go(lambda: signals.stopped, watcher)
            except KeyboardInterrupt:
                signals.stopped = True
            results.close()
            if as_json:
                write_json(
                    {**run.totals.to_dict(), "stopped": signals.stopped, "total": total, "done": run.written + done}
                )
            note(str(run.totals))
        if signals.stopped and run.written + done < total:
            how = "; run the same command with --resume for the rest" if results.is_file else ""
            note(f"stopped: {run.written + done} of {total} requests are answered in {results.name}{how}")
            return STOPPED
        return 1 if run.totals.errors or failed else 0

    def _engine(self) -> Engine:
        with spinner(f"Loading {self._resolved.engine.model.path} ..."):
            from pegboard.core.engine.engine import Engine

            return Engine(self._resolved)
