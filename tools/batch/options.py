"""Options of `pegboard generate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.toolkit.media.inputs import MediaInput
    from pegboard.tools.batch.output import Mode

_FILE = "With --file"


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are drawn."""

    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.")] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that reach this share.")] = None
    top_k: Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")] = None
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be given again.")] = None
    sampling: Annotated[
        str, typer.Option(metavar="JSON", help="More sampling parameters, such as '{\"min_p\": 0.1}'.")
    ] = ""

    def values(self) -> dict[str, Any]:
        """Return the parameters by name, without those that were not given. Raise PegboardError for broken JSON."""
        given = {"top_p": self.top_p, "top_k": self.top_k, "seed": self.seed, "stop": self.stop or None}
        values = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return values | {name: value for name, value in given.items() if value is not None} | _parsed(self.sampling)


@dataclass(frozen=True)
class TemplateOptions:
    """Whether prompts are conversations."""

    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Put prompts into the model's chat template.", show_default="raw"),
    ] = None
    system: Annotated[str, typer.Option(help="System message of conversations without one; implies --chat.")] = ""

    @property
    def applies(self) -> bool:
        """Whether prompts go into the chat template."""
        return bool(self.chat) or bool(self.system)

    def applies_to(self, media: Sequence[MediaInput]) -> bool:
        """Return whether a prompt does that has these media: unless --raw is given, whose prompts have placeholders."""
        return self.applies or (self.chat is None and bool(media))


@dataclass(frozen=True)
class MediaOptions:
    """Pictures and videos of the one prompt. They imply --chat, and go before its text; with --raw the prompt has a
    placeholder for each of them.
    """

    image: Annotated[list[Path] | None, typer.Option(help="A picture for the prompt, a file; may be given again.")] = (
        None
    )
    video: Annotated[
        list[Path] | None,
        typer.Option(help="A video, also repeatable; videos go after pictures."),
    ] = None

    def read(self) -> list[MediaInput]:
        """Return the media, in their order. Raise PegboardError for files that cannot be read."""
        from pegboard.tools.chat.attachments import read_media

        images = [read_media(path, "image", "--image") for path in self.image or ()]
        return images + [read_media(path, "video", "--video") for path in self.video or ()]

    def refuse_with_file(self) -> None:
        """Raise PegboardError for media beside a file of prompts."""
        for flag, used in (("--image", self.image), ("--video", self.video)):
            if used:
                raise PegboardError(f"{flag} goes with one prompt, not with --file")


@dataclass(frozen=True)
class FileOptions:
    """A run over a file of prompts."""

    file: Annotated[
        Path | None,
        typer.Option(help="Answer a file of prompts, a JSON object per line; - is stdin.", rich_help_panel=_FILE),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(help="File for the answers, a JSON object per line; - is stdout.", rich_help_panel=_FILE),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the output of a stopped run.", rich_help_panel=_FILE)
    ] = False
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="As --resume; try failed requests again too.", rich_help_panel=_FILE),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.", rich_help_panel=_FILE)
    ] = False
    skip_bad_lines: Annotated[
        bool,
        typer.Option(
            "--skip-bad-lines",
            help="Answer invalid lines with an error, instead of refusing the file.",
            rich_help_panel=_FILE,
        ),
    ] = False
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Write answers in the order of the lines.", rich_help_panel=_FILE)
    ] = False
    window: Annotated[int, typer.Option(min=1, help="Maximum requests in progress at once.", rich_help_panel=_FILE)] = (
        512
    )

    def refuse_without_file(self) -> None:
        """Raise PegboardError for an option that needs --file."""
        for flag, used in (
            ("--output", self.output),
            ("--resume", self.resume),
            ("--retry-failed", self.retry_failed),
            ("--overwrite", self.overwrite),
            ("--skip-bad-lines", self.skip_bad_lines),
            ("--keep-order", self.keep_order),
        ):
            if used:
                raise PegboardError(f"{flag} goes with --file")

    def checked_output(self, *, as_json: bool) -> Path:
        """Return where the answers go. Raise PegboardError where that is missing, or options exclude each other."""
        if self.output is None:
            raise PegboardError("--file needs --output, which says where the answers go (- is stdout)")
        if self.overwrite and (self.resume or self.retry_failed):
            raise PegboardError("--overwrite starts anew, --resume goes on; they exclude each other")
        if as_json and str(self.output) == "-":
            raise PegboardError("--json prints the summary where --output - has the answers; choose one")
        return self.output

    @property
    def mode(self) -> Mode:
        """What becomes of an output that is there already."""
        if self.overwrite:
            return "overwrite"
        return "resume" if self.resume or self.retry_failed else "new"


def _parsed(sampling: str) -> dict[str, Any]:
    try:
        values = json.loads(sampling) if sampling else {}
    except ValueError as error:
        raise PegboardError(f"--sampling: this is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise PegboardError("--sampling must be a JSON object, such as '{\"min_p\": 0.1}'")
    return values
