"""``pegboard train-draft``: from a config to a draft head for its model."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

from pegboard.core.cli.config import Files, Overrides
from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.output import note, quiet_logging
from pegboard.tools.option_groups import with_option_groups
from pegboard.tools.train_draft.options import AnswerOptions, RunOptions, TrainOptions

if TYPE_CHECKING:
    from pegboard.tools.train_draft.run import DraftRun

STOPPED = 130
"""Exit code of what was stopped, as shells have it for Ctrl-C."""


@with_option_groups
def train_draft(
    *,
    files: Files = None,
    overrides: Overrides = None,
    answers: AnswerOptions,
    training: TrainOptions,
    run: RunOptions,
) -> None:
    """Train an EAGLE-3 draft head for a model, on answers that it generates itself.

    The same command continues a run that was stopped, by Ctrl-C or in any other way.
    """
    from pegboard.toolkit.system.threads import yield_when_waiting

    yield_when_waiting()
    from pegboard.core.config.compose import compose
    from pegboard.tools.signals import Signals

    taps = answers.places()
    resolved = compose(files or (), overrides=overrides or ())
    quiet_logging(resolved.engine.log_level)
    prompts = answers.read_prompts(training.seed)
    settings = answers.settings(resolved.engine.model.path, prompts.digest, training.seed)
    with Signals() as signals:
        from pegboard.tools.train_draft.engines import Engines
        from pegboard.tools.train_draft.run import DraftRun
        from pegboard.tools.train_draft.workdir import WorkDir

        folder = WorkDir(run.out, data=answers.data)
        with folder.held(overwrite=run.overwrite):
            settings = folder.settle_answers(settings, taps)
            folder.settle_training(training.settings())
            signals.gentle()
            engines = Engines(tuple(files or ()), tuple(overrides or ()))
            _go(DraftRun(
                folder, engines, settings, training.settings(), prompts, taps, lambda: signals.stopped,
                threads=run.threads, bf16=run.bf16, command=shlex.join(["pegboard", *sys.argv[1:]]),
            ))  # fmt: skip


def _go(run: DraftRun) -> None:
    """Do what is left of a run, and say how it goes on where it is stopped."""
    from pegboard.tools.train_draft.answers import Stopped

    try:
        run.go()
    except (Stopped, KeyboardInterrupt):
        note("stopped; the same command goes on from here")
        raise typer.Exit(STOPPED) from None
    except OSError as error:
        raise PegboardError(f"--out: {error.filename or run.folder.directory}: {error.strerror}") from None
