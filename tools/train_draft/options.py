"""Options of `pegboard train-draft`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.train_draft.settings import MAX_TTT, AnswerSettings, TrainSettings

if TYPE_CHECKING:
    from pegboard.tools.train_draft.prompts import Prompts

_ANSWERS, _TRAINING, _RUN = "Answers", "Training", "The run"


@dataclass(frozen=True)
class AnswerOptions:
    """What is trained on."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='A file of prompts: JSON lines with "prompt" or "messages". Without it: varied ones of our own.',
            rich_help_panel=_ANSWERS,
        ),
    ] = None
    tokens: Annotated[
        int, typer.Option(min=1, help="Generate this many tokens of answers.", rich_help_panel=_ANSWERS)
    ] = AnswerSettings.tokens
    held_out: Annotated[int, typer.Option(min=1, help="Prompts for the evaluation only.", rich_help_panel=_ANSWERS)] = (
        AnswerSettings.held_out
    )
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.", rich_help_panel=_ANSWERS)] = (
        AnswerSettings.max_new_tokens
    )
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of drawn answers.", rich_help_panel=_ANSWERS)
    ] = AnswerSettings.temperature
    greedy_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of answers that are greedy.", rich_help_panel=_ANSWERS)
    ] = AnswerSettings.greedy
    streams: Annotated[
        int, typer.Option(min=1, help="Answers that are generated at once.", rich_help_panel=_ANSWERS)
    ] = AnswerSettings.streams
    taps: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            help="Layers whose inputs the head reads; by default the third, the middle one and the third from the end.",
            rich_help_panel=_ANSWERS,
        ),
    ] = ""
    data: Annotated[
        Path | None,
        typer.Option(
            help="Use answers and states of another run's directory; options of answers then have no effect.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None

    def settings(self, model: str, prompts: str, seed: int) -> AnswerSettings:
        """Return the settings of the answers of `model` to the prompts with this digest."""
        return AnswerSettings(
            model,
            prompts,
            self.tokens,
            self.held_out,
            self.max_new_tokens,
            self.temperature,
            self.greedy_share,
            self.streams,
            seed,
        )

    def read_prompts(self, seed: int) -> Prompts:
        """Return the prompts, in an order that `seed` draws. Raises PegboardError for a file without prompts."""
        from pegboard.tools.train_draft.prompts import built_in, from_file

        return built_in(seed, self.held_out) if self.prompts is None else from_file(self.prompts, seed, self.held_out)

    def places(self) -> tuple[int, ...] | None:
        """Return the taps, None for the default. Raises PegboardError for what are no numbers."""
        if not self.taps:
            return None
        try:
            return tuple(int(one) for one in self.taps.split(","))
        except ValueError:
            raise PegboardError(f"--taps must be numbers with commas between them, got {self.taps!r}") from None


@dataclass(frozen=True)
class TrainOptions:
    """How it is trained."""

    train_tokens: Annotated[
        int,
        typer.Option(min=0, help="Number of the answers' tokens to train on; 0: all.", rich_help_panel=_TRAINING),
    ] = TrainSettings.tokens
    draft_vocab: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens that the head can draft, at most: the most frequent ones.", rich_help_panel=_TRAINING
        ),
    ] = TrainSettings.draft_vocab
    ttt: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_TTT, help="Steps of test-time training: drafts in a row.", rich_help_panel=_TRAINING
        ),
    ] = TrainSettings.ttt
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.", rich_help_panel=_TRAINING)] = (
        TrainSettings.epochs
    )
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a batch, prompts included.", rich_help_panel=_TRAINING)
    ] = TrainSettings.batch_tokens
    learning_rate: Annotated[
        float, typer.Option(min=1e-8, max=1.0, help="Highest learning rate of AdamW.", rich_help_panel=_TRAINING)
    ] = TrainSettings.learning_rate
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of prompts, draws and the order of batches.", rich_help_panel=_TRAINING)
    ] = TrainSettings.seed

    def settings(self) -> TrainSettings:
        """Return the settings of the training."""
        return TrainSettings(
            self.train_tokens,
            self.draft_vocab,
            self.ttt,
            self.epochs,
            self.batch_tokens,
            self.learning_rate,
            self.seed,
        )


@dataclass(frozen=True)
class RunOptions:
    """Where it goes, and with what."""

    out: Annotated[
        Path,
        typer.Option(help="Directory of the head, and of what a stopped run needs to continue.", rich_help_panel=_RUN),
    ] = Path("draft")
    threads: Annotated[
        int,
        typer.Option(
            min=0,
            help="Threads of the training; 0: torch decides. On a busy machine 1 is the fastest.",
            rich_help_panel=_RUN,
        ),
    ] = 0
    bf16: Annotated[
        bool | None,
        typer.Option(
            "--bf16/--fp32", help="Products of the training.", show_default="what is faster", rich_help_panel=_RUN
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Discard an earlier run in the directory.", rich_help_panel=_RUN)
    ] = False
