"""Options that the commands of `pegboard bench` share, and what their texts mean."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from pegboard.tools.bench.workloads import Shape


class ApiName(StrEnum):
    """Protocols of servers."""

    AUTO = "auto"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"
    NATIVE = "native"


class PromptKind(StrEnum):
    """What prompts are made of."""

    AUTO = "auto"
    TOKENS = "tokens"
    TEXT = "text"


class WorkloadName(StrEnum):
    """Kind of requests."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    IMAGES = "images"
    FILE = "file"


class StepMode(StrEnum):
    """What one step computes."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


WORKLOAD, LOAD, REQUESTS, SERVER, RESULTS = "Workload", "Load", "Requests", "Server", "Results"
DEFAULT_REQUESTS = 100

ImageSizeText = Annotated[
    str, typer.Option(metavar="WxH", help="Pixels of a picture, width and height.", rich_help_panel=WORKLOAD)
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.", rich_help_panel=WORKLOAD)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file; - prints.", rich_help_panel=RESULTS)
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw pictures into this directory.", metavar="DIR", rich_help_panel=RESULTS)
]


@dataclass(frozen=True)
class ServerOptions:
    """The server that is measured."""

    url: Annotated[str, typer.Option(help="Where the server is.", rich_help_panel=SERVER)] = "http://127.0.0.1:30000"
    api: Annotated[ApiName, typer.Option(help="Protocol; auto: the first that works.", rich_help_panel=SERVER)] = (
        ApiName.AUTO
    )
    model: Annotated[
        str, typer.Option(help="The model's name; the server's first by default.", rich_help_panel=SERVER)
    ] = ""
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the server's key.", rich_help_panel=SERVER)] = (
        None
    )
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a server that is starting.", rich_help_panel=SERVER)
    ] = 0.0

    @property
    def key(self) -> str:
        """The API key from the file, or from the environment."""
        if self.api_key_file is None:
            return os.environ.get("PEGBOARD_API_KEY", "")
        try:
            return self.api_key_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PegboardError(f"--api-key-file: {self.api_key_file}: {reason}") from None


@dataclass(frozen=True)
class WorkloadOptions:
    """The requests of a run."""

    workload: Annotated[WorkloadName, typer.Option(help="Kind of requests.", rich_help_panel=WORKLOAD)] = (
        WorkloadName.RANDOM
    )
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of requests; 100 by default, or all of a file.",
            show_default=False,
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.", rich_help_panel=WORKLOAD)] = 128
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=WORKLOAD)] = 128
    range_ratio: Annotated[
        float,
        typer.Option(
            help="Lengths are drawn between (1 - ratio) and (1 + ratio) times these.", rich_help_panel=WORKLOAD
        ),
    ] = 0.0
    prefix_len: Annotated[
        int, typer.Option(min=1, help="shared-prefix: tokens that a group shares.", rich_help_panel=WORKLOAD)
    ] = 1024
    groups: Annotated[int, typer.Option(min=1, help="shared-prefix: number of groups.", rich_help_panel=WORKLOAD)] = 1
    turns: Annotated[
        int, typer.Option(min=1, help="multi-turn: requests of a conversation.", rich_help_panel=WORKLOAD)
    ] = 4
    images: Annotated[int, typer.Option(min=1, help="images: pictures of a request.", rich_help_panel=WORKLOAD)] = 1
    image_size: ImageSizeText = "1024x1024"
    file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, chats, ShareGPT or a trace, as JSON or a JSON object per line.", rich_help_panel=WORKLOAD
        ),
    ] = None
    prompt_kind: Annotated[
        PromptKind,
        typer.Option(help="Token ids, or text; auto: ids, if accepted.", rich_help_panel=WORKLOAD),
    ] = PromptKind.AUTO
    seed: Seed = 0

    @property
    def name(self) -> str:
        """The workload's name. A file is a workload, without its being called one."""
        by_file = self.file is not None and self.workload is WorkloadName.RANDOM
        return WorkloadName.FILE.value if by_file else self.workload.value

    def shape(self, requests: int) -> Shape:
        """Return the shape of a run of so many requests."""
        from pegboard.tools.bench.images import ImageSize
        from pegboard.tools.bench.workloads import Shape

        return Shape(
            requests,
            self.input_len,
            self.output_len,
            self.range_ratio,
            self.groups,
            self.prefix_len,
            self.turns,
            self.images,
            ImageSize.parse(self.image_size),
        )


@dataclass(frozen=True)
class ArrivalOptions:
    """When requests are sent to a server."""

    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: number of requests at a time.", rich_help_panel=LOAD)
    ] = None
    request_rate: Annotated[
        float, typer.Option(help="Open loop: average arrivals per second; inf: all at once.", rich_help_panel=LOAD)
    ] = math.inf
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson arrivals; below: in bursts; above: more evenly.", rich_help_panel=LOAD)
    ] = 1.0
    replay: Annotated[
        float | None,
        typer.Option(
            metavar="SPEED", help="Send requests at a file's timestamps, this many times as fast.", rich_help_panel=LOAD
        ),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How often it is measured."""

    repeat: Annotated[int, typer.Option(min=1, help="Runs, over which medians are taken.", rich_help_panel=LOAD)] = 1
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the first run.", rich_help_panel=LOAD)] = 1


@dataclass(frozen=True)
class SearchOptions:
    """The search for the highest rate that keeps within a bound."""

    find_rate: Annotated[
        str,
        typer.Option(
            metavar="BOUND",
            help="Search for the highest rate within a bound, such as ttft:p99:1000 (ms).",
            rich_help_panel=LOAD,
        ),
    ] = ""
    trial_seconds: Annotated[float, typer.Option(help="--find-rate: duration of a trial.", rich_help_panel=LOAD)] = 30.0
    precision: Annotated[
        float, typer.Option(help="--find-rate: precision, as a share of the rate.", rich_help_panel=LOAD)
    ] = 0.05


@dataclass(frozen=True)
class AnswerOptions:
    """What every request says about its answer."""

    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=REQUESTS)] = 0.0
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--stop-at-eos", help="Answers have their full length.", rich_help_panel=REQUESTS),
    ] = True


@dataclass(frozen=True)
class RequestOptions(AnswerOptions):
    """What every request to a server says, and how long it may take."""

    extra_body: Annotated[
        str,
        typer.Option(
            metavar="JSON", help="Further fields of requests, such as '{\"top_p\": 0.9}'.", rich_help_panel=REQUESTS
        ),
    ] = ""
    timeout: Annotated[
        float,
        typer.Option(help="Seconds without a byte after which a request fails.", rich_help_panel=REQUESTS),
    ] = 600.0


@dataclass(frozen=True)
class ResultOptions:
    """Where figures go."""

    json_file: JsonFile = None
    save_requests: Annotated[
        bool, typer.Option("--save-requests", help="Add every request to --json.", rich_help_panel=RESULTS)
    ] = False
    plot: Plot = None

    @property
    def prints_json(self) -> bool:
        """Whether JSON goes to stdout, so that nothing else may."""
        return self.json_file is not None and str(self.json_file) == "-"


def json_object(text: str, option: str) -> dict[str, Any]:
    """Return what an option has as JSON. Raises PegboardError."""
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise PegboardError(f"{option}: this is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise PegboardError(f"{option} must be a JSON object, such as '{{\"top_p\": 0.9}}'")
    return found


def slo_of(given: list[str]) -> dict[str, float]:
    """Milliseconds by latency, from ``ttft:1000`` and the like. Raises PegboardError."""
    found: dict[str, float] = {}
    for part in " ".join(given).replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in ("ttft", "tpot", "e2e") or not found[name] > 0:
            raise PegboardError(f"--slo: {part!r} is not ttft:MS, tpot:MS or e2e:MS")
    return found
