"""``pegboard bench serve``: how fast a server is."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.commands.output import check_writable, note, spinner, write, write_json, write_table
from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from pegboard.core.bench.load import Progress, Watcher
    from pegboard.core.bench.serve import Measured, ServeSettings

STOPPED = 130

app = typer.Typer(no_args_is_help=True, help="Measure how fast a server, an engine or one step is.")


class ApiName(StrEnum):
    """Protocols."""

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
    """Workloads."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"


_WORKLOAD, _LOAD, _REQUESTS, _SERVER, _RESULTS = "Workload", "Load", "Requests", "Server", "Results"


@app.command()
def serve(
    url: Annotated[
        str, typer.Option(help="Where the server is, as http://127.0.0.1:30000.", rich_help_panel=_SERVER)
    ] = "http://127.0.0.1:30000",
    api: Annotated[
        ApiName, typer.Option(help="How it is asked; auto: OpenAI's way, if it has it.", rich_help_panel=_SERVER)
    ] = ApiName.AUTO,
    model: Annotated[
        str, typer.Option(help="The model's name; by default the first that the server has.", rich_help_panel=_SERVER)
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the server's key.", rich_help_panel=_SERVER)
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a server that is starting.", rich_help_panel=_SERVER)
    ] = 0.0,
    workload: Annotated[
        WorkloadName, typer.Option(help="What is asked.", rich_help_panel=_WORKLOAD)
    ] = WorkloadName.RANDOM,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many requests.", rich_help_panel=_WORKLOAD)] = 100,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.", rich_help_panel=_WORKLOAD)] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=_WORKLOAD)] = 128,
    range_ratio: Annotated[
        float,
        typer.Option(
            help="Lengths are drawn between (1 - ratio) and (1 + ratio) times these.", rich_help_panel=_WORKLOAD
        ),
    ] = 0.0,
    prefix_len: Annotated[
        int, typer.Option(min=1, help="shared-prefix: tokens that a group shares.", rich_help_panel=_WORKLOAD)
    ] = 1024,
    groups: Annotated[
        int, typer.Option(min=1, help="shared-prefix: how many prefixes.", rich_help_panel=_WORKLOAD)
    ] = 1,
    turns: Annotated[
        int, typer.Option(min=1, help="multi-turn: requests of a conversation.", rich_help_panel=_WORKLOAD)
    ] = 4,
    prompt_kind: Annotated[
        PromptKind, typer.Option(help="Token ids, or text; auto: ids, if it takes them.", rich_help_panel=_WORKLOAD)
    ] = PromptKind.AUTO,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.", rich_help_panel=_WORKLOAD)] = 0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: so many requests at a time.", rich_help_panel=_LOAD),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(help="Open loop: arrivals per second on average; inf: all at once.", rich_help_panel=_LOAD),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(help="1: Poisson arrivals; below: in bursts; above: more evenly.", rich_help_panel=_LOAD),
    ] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="So many runs, and medians over them.", rich_help_panel=_LOAD)] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the first run.", rich_help_panel=_LOAD)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_REQUESTS)] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--stop-at-eos", help="Answers have their full length.", rich_help_panel=_REQUESTS),
    ] = True,
    extra_body: Annotated[
        str,
        typer.Option(
            metavar="JSON", help="Further fields of requests, as '{\"top_p\": 0.9}'.", rich_help_panel=_REQUESTS
        ),
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(help="A request has failed after so many seconds without a byte.", rich_help_panel=_REQUESTS),
    ] = 600.0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Goodput: what counts as good, as ttft:1000 (ms); may be given again.", rich_help_panel=_RESULTS
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file; - prints.", rich_help_panel=_RESULTS)
    ] = None,
    save_requests: Annotated[
        bool, typer.Option("--save-requests", help="Put every request into --json.", rich_help_panel=_RESULTS)
    ] = False,
) -> None:
    """Measure a server: any that has OpenAI's API, or Pegboard's own."""
    if json_file is not None and str(json_file) != "-":
        check_writable(json_file, "--json")
    from pegboard.core.bench.serve import Measurement, ServeSettings, run_loop
    from pegboard.core.bench.workloads import Shape

    settings = ServeSettings(
        url=url,
        api=api.value,
        model=model,
        prompt_kind=prompt_kind.value,
        workload=workload.value,
        shape=Shape(num_prompts, input_len, output_len, range_ratio, groups, prefix_len, turns),
        concurrency=concurrency,
        request_rate=request_rate,
        burstiness=burstiness,
        seed=seed,
        repeat=repeat,
        warmup=warmup,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra=_extra(extra_body),
        slo=_slo(slo or []),
        timeout=timeout,
        wait=wait,
    )
    with _progress(num_prompts, repeat) as watch:
        waiting = lambda: spinner(f"Waiting for {url} ...")  # noqa: E731
        measurement = Measurement(settings, _key(api_key_file), waiting=waiting, watch=watch)
        measured = run_loop(measurement.measure)
    raise typer.Exit(_show(settings, measured, json_file, save_requests=save_requests))


def _extra(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise PegboardError(f"--extra-body: this is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise PegboardError("--extra-body must be a JSON object, such as '{\"top_p\": 0.9}'")
    return found


def _slo(given: list[str]) -> dict[str, float]:
    found = {}
    for part in (one.strip() for text in given for one in text.replace(",", " ").split()):
        name, _, value = part.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in ("ttft", "tpot", "e2e") or not found[name] > 0:
            raise PegboardError(f"--slo: {part!r} is not ttft:MS, tpot:MS or e2e:MS")
    return found


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get("PEGBOARD_API_KEY", "")
    try:
        return file.read_text("utf-8").strip()
    except OSError as error:
        raise PegboardError(f"--api-key-file: {file}: {error.strerror}") from None


@contextlib.contextmanager
def _progress(total: int, runs: int) -> Iterator[Any]:
    """What makes a watcher for each run: a bar on a terminal, otherwise nothing."""
    if not sys.stderr.isatty():
        yield lambda run: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False, transient=True) as bar:

        def watcher(run: int) -> Watcher:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(f"run {run + 1} of {runs}" if runs > 1 else "", total=total, said="")

            def watch(progress: Progress) -> None:
                failed = f"  {progress.failed} failed" if progress.failed else ""
                said = f"{progress.tokens / max(progress.seconds, 1e-9):.0f} tok/s{failed}"
                bar.update(task, completed=progress.done + progress.failed, said=said)
                bar.refresh()

            return watch

        yield watcher


def _show(settings: ServeSettings, measured: Measured, file: Path | None, *, save_requests: bool) -> int:
    from pegboard.core.bench.figures import median
    from pegboard.core.bench.report import latencies, totals

    middle = median(measured.runs)
    printed = file is not None and str(file) == "-"
    if not printed:
        of = f"medians of {len(measured.runs)} runs" if len(measured.runs) > 1 else ""
        write_table((settings.workload, of), totals(middle))
        write()
        head, rows = latencies(middle)
        write_table(head, rows)
    if file is not None:
        data = _as_json(settings, measured, middle, save_requests=save_requests)
        if printed:
            write_json(data)
        else:
            file.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    for text in measured.notes:
        note(f"note: {text}")
    if measured.stopped:
        note(f"stopped: {measured.stopped}")
    failed = sum(run["failed"] + run["unsent"] for run in measured.runs)
    if failed:
        note(f"{failed} of {sum(run['requests'] for run in measured.runs)} requests failed or were not sent:")
        for run in measured.runs:
            for error in run["errors"]:
                note(f"  {error['count']} x {error['message']}")
    return 1 if failed or measured.stopped else 0


def _as_json(
    settings: ServeSettings, measured: Measured, middle: dict[str, Any], *, save_requests: bool
) -> dict[str, Any]:
    from pegboard.core.bench.report import FORMAT, plain
    from pegboard.core.version import __version__

    target = measured.target
    data: dict[str, Any] = {
        "format": FORMAT,
        "kind": "serve",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "pegboard": __version__,
        "settings": dataclasses.asdict(settings),
        "server": {
            "url": str(target.client.address),
            "api": target.api.name,
            "prompt_kind": target.kind.value,
            "model": target.wanted.model,
            **target.about,
        },
        "notes": measured.notes,
        "median": middle,
        "runs": measured.runs,
    }
    data = plain(data)
    if save_requests:
        for run, outcome in zip(data["runs"], measured.outcomes, strict=True):
            run["records"] = [one.to_dict(outcome.start) for one in outcome.records]
    return data
