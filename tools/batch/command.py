"""``pegboard generate``: answers without a server: to one prompt, or to a file of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.config import Json, Overrides
from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.output import note, quiet_logging, spinner, write, write_json
from pegboard.tools.batch.options import FileOptions, MediaOptions, SamplingOptions, TemplateOptions
from pegboard.tools.option_groups import with_option_groups

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.engine.engine import Engine
    from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
    from pegboard.tools.batch.lines import Defaults, PromptFile
    from pegboard.tools.batch.output import Output
    from pegboard.tools.signals import Signals

STOPPED = 130
"""Exit code of a run that was stopped, as shells have it for Ctrl-C."""
SHOWN_PROBLEMS = 10


@with_option_groups
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. With --file leave it out: model and config files come first."),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|FILE", help="The model, and config files (YAML, TOML, JSON), merged in order."),
    ] = None,
    overrides: Overrides = None,
    sampling: SamplingOptions,
    template: TemplateOptions,
    media: MediaOptions,
    lines: FileOptions,
    as_json: Json = False,
) -> None:
    """Answer one prompt, or a file of prompts, in this process.

    A run over a file can be stopped with Ctrl-C and continued with --resume.
    """
    values, paths = sampling.values(), list(files or ())
    if lines.file is None:
        lines.refuse_without_file()
        if prompt is None:
            raise PegboardError("there is no prompt; give one, or a file of them with --file")
        _one(_config(paths, overrides), prompt, media.read(), values, template, as_json=as_json)
        return
    media.refuse_with_file()
    if prompt is not None:
        paths.insert(0, prompt)
    output = lines.checked_output(as_json=as_json)
    command = _Command(_config(paths, overrides), values, template, lines, as_json=as_json)
    raise typer.Exit(command.run(lines.file, output))


def _config(files: list[str], overrides: list[str] | None) -> ResolvedConfig:
    from pegboard.core.config.compose import compose

    resolved = compose(files, overrides=overrides or ())
    quiet_logging(resolved.engine.log_level)
    return resolved


def _one(
    resolved: ResolvedConfig,
    prompt: str,
    media: Sequence[MediaInput],
    values: dict[str, Any],
    template: TemplateOptions,
    *,
    as_json: bool,
) -> None:
    from pegboard.core.engine.engine import Engine
    from pegboard.toolkit.media.inputs import MediaPrompt
    from pegboard.tools.batch.lines import sampling_of

    sampling = sampling_of(values)
    chat = template.applies_to(media)
    with Engine(resolved) as engine:
        asked: str | MediaPrompt = prompt
        if chat:
            asked = _conversation(engine, prompt, media, template.system)
        elif media:
            asked = MediaPrompt(base=prompt, media=tuple(media))
        [output] = engine.generate([asked], sampling, add_special_tokens=not chat)
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


def _conversation(engine: Engine, prompt: str, media: Sequence[MediaInput], system: str) -> str | MediaPrompt:
    """Return the prompt of a conversation of one message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    from pegboard.toolkit.media.service import reader_of

    if reader_of(engine) is None and not media:
        return engine.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])
    from pegboard.tools.chat.conversation import Interlocutor

    content = [*media, {"type": "text", "text": prompt}] if media else prompt
    return Interlocutor(engine).prompt([*messages, {"role": "user", "content": content}])


class _Command:
    """A run over a file, from the first look at it to the exit code."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        values: dict[str, Any],
        template: TemplateOptions,
        options: FileOptions,
        *,
        as_json: bool,
    ) -> None:
        from pegboard.tools.batch.lines import Defaults, sampling_of

        sampling_of(values)
        self._resolved = resolved
        self._defaults: Defaults = Defaults(values, resolved.engine.model.path, template.applies, template.system)
        self._options = options
        self._as_json = as_json

    def run(self, file: Path, output: Path) -> int:
        """Answer the prompts of `file` into `output`; return the exit code."""
        from pegboard.tools.batch.lines import PromptFile
        from pegboard.tools.batch.output import Output
        from pegboard.tools.signals import Signals

        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(Signals())
            try:
                source = stack.enter_context(contextlib.closing(PromptFile(file)))
                results = stack.enter_context(
                    contextlib.closing(Output(output, self._options.mode, retry_failed=self._options.retry_failed))
                )
                total, duplicates = self._check(source, results)
                if len(results.done) >= total:
                    note(
                        f"nothing to do: {results.name} has an answer to each of the {total} requests of {source.name}"
                    )
                    return 1 if results.failed else 0
                return self._generate(source, results, total, duplicates, signals)
            except KeyboardInterrupt:
                note("stopped before anything was generated")
                return STOPPED

    def _check(self, source: PromptFile, results: Output) -> tuple[int, frozenset[int]]:
        """Return how many requests there are, and on which lines an id comes again. Raises PegboardError for bad
        lines.
        """
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
        if wrong and not self._options.skip_bad_lines:
            more = [f"and {wrong - len(problems)} more"] if wrong > len(problems) else []
            raise PegboardError(
                "\n  ".join(
                    [f"{wrong} of {total} lines are wrong (--skip-bad-lines goes on without):", *problems, *more]
                )
            )
        return total, frozenset(duplicates)

    def _generate(
        self, source: PromptFile, results: Output, total: int, duplicates: frozenset[int], signals: Signals
    ) -> int:
        from pegboard.tools.batch.progress import progress
        from pegboard.tools.batch.run import Run

        done, failed, keep_order = len(results.done), results.failed, self._options.keep_order
        if keep_order and done and max(results.done) >= done:
            raise PegboardError(f"--keep-order: the answers in {results.name} are not in order; resume without it")
        if done:
            note(f"{done} of {total} requests are answered in {results.name}; going on with the rest")
        with self._engine() as engine:
            results.begin()
            lines, window = source.lines(self._defaults, duplicates), self._options.window
            run = Run(engine, lines, results, window=window, in_order=keep_order)
            signals.gentle()
            try:
                with progress(total, done) as watcher:
                    run.go(lambda: signals.stopped, watcher)
            except KeyboardInterrupt:
                signals.stopped = True
            results.close()
            if self._as_json:
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
