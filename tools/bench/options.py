"""Options that the commands of `pegboard bench` share, and what their texts mean."""

from __future__ import annotations

import json
import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pegboard.core.interfaces.errors import PegboardError


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
    """What is asked."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    FILE = "file"


class StepMode(StrEnum):
    """What one step computes."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


WORKLOAD, LOAD, REQUESTS, SERVER, RESULTS = "Workload", "Load", "Requests", "Server", "Results"

Workload = Annotated[WorkloadName, typer.Option(help="What is asked.", rich_help_panel=WORKLOAD)]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many requests; 100 by default, of a file all.", show_default=False, rich_help_panel=WORKLOAD
    ),
]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.", rich_help_panel=WORKLOAD)]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=WORKLOAD)]
RangeRatio = Annotated[
    float,
    typer.Option(help="Lengths are drawn between (1 - ratio) and (1 + ratio) times these.", rich_help_panel=WORKLOAD),
]
PrefixLen = Annotated[
    int, typer.Option(min=1, help="shared-prefix: tokens that a group shares.", rich_help_panel=WORKLOAD)
]
Groups = Annotated[int, typer.Option(min=1, help="shared-prefix: how many prefixes.", rich_help_panel=WORKLOAD)]
Turns = Annotated[int, typer.Option(min=1, help="multi-turn: requests of a conversation.", rich_help_panel=WORKLOAD)]
File = Annotated[
    Path | None,
    typer.Option(
        help="Prompts, chats, ShareGPT or a trace, as JSON or a JSON object per line.", rich_help_panel=WORKLOAD
    ),
]
Kind = Annotated[
    PromptKind, typer.Option(help="Token ids, or text; auto: ids, where they are taken.", rich_help_panel=WORKLOAD)
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.", rich_help_panel=WORKLOAD)]
Repeat = Annotated[int, typer.Option(min=1, help="So many runs, and medians over them.", rich_help_panel=LOAD)]
Warmup = Annotated[int, typer.Option(min=0, help="Requests before the first run.", rich_help_panel=LOAD)]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=REQUESTS)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos/--stop-at-eos", help="Answers have their full length.", rich_help_panel=REQUESTS)
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file; - prints.", rich_help_panel=RESULTS)
]
SaveRequests = Annotated[
    bool, typer.Option("--save-requests", help="Put every request into --json.", rich_help_panel=RESULTS)
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw pictures into this directory.", metavar="DIR", rich_help_panel=RESULTS)
]


DEFAULT_REQUESTS = 100


def workload_name(name: WorkloadName, file: Path | None) -> str:
    """A file is a workload, without its being called one."""
    return WorkloadName.FILE.value if file is not None and name is WorkloadName.RANDOM else name.value


def json_object(text: str, option: str) -> dict[str, Any]:
    """What an option has as JSON. Raises PegboardError."""
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise PegboardError(f"{option}: this is no JSON: {error}") from None
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


def key_of(file: Path | None) -> str:
    """The API key from a file, or from the environment."""
    if file is None:
        return os.environ.get("PEGBOARD_API_KEY", "")
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PegboardError(f"--api-key-file: {file}: {getattr(error, 'strerror', None) or error}") from None
