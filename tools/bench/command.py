"""``pegboard bench``: how fast a server, an engine in this process, or one step of it is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.output import note, spinner, write, write_table
from pegboard.tools.bench import local_commands as bench_local
from pegboard.tools.bench import options
from pegboard.tools.bench.output import (
    check_results,
    head,
    progress,
    show_figures,
    tell_failures,
    with_records,
    write_results,
)

if TYPE_CHECKING:
    from pegboard.tools.bench.serve import Measured, ServeSettings

app = typer.Typer(no_args_is_help=True, help="Measure how fast a server, an engine, or one step of it is.")


@app.command()
def serve(
    url: Annotated[
        str, typer.Option(help="Where the server is.", rich_help_panel=options.SERVER)
    ] = "http://127.0.0.1:30000",
    api: Annotated[
        options.ApiName, typer.Option(help="How it is asked; auto: as OpenAI is.", rich_help_panel=options.SERVER)
    ] = options.ApiName.AUTO,
    model: Annotated[
        str, typer.Option(help="The model's name; the server's first by default.", rich_help_panel=options.SERVER)
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the server's key.", rich_help_panel=options.SERVER)
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait for a server that is starting.", rich_help_panel=options.SERVER),
    ] = 0.0,
    workload: options.Workload = options.WorkloadName.RANDOM,
    num_prompts: options.NumPrompts = None,
    input_len: options.InputLen = 128,
    output_len: options.OutputLen = 128,
    range_ratio: options.RangeRatio = 0.0,
    prefix_len: options.PrefixLen = 1024,
    groups: options.Groups = 1,
    turns: options.Turns = 4,
    file: options.File = None,
    prompt_kind: options.Kind = options.PromptKind.AUTO,
    seed: options.Seed = 0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: so many requests at a time.", rich_help_panel=options.LOAD),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(help="Open loop: arrivals per second on average; inf: all at once.", rich_help_panel=options.LOAD),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(help="1: Poisson arrivals; below: in bursts; above: more evenly.", rich_help_panel=options.LOAD),
    ] = 1.0,
    replay: Annotated[
        float | None,
        typer.Option(
            metavar="SPEED",
            help="Arrivals are a file's timestamps, so many times as fast.",
            rich_help_panel=options.LOAD,
        ),
    ] = None,
    repeat: options.Repeat = 1,
    warmup: options.Warmup = 1,
    find_rate: Annotated[
        str,
        typer.Option(
            metavar="BOUND",
            help="Search the highest rate that keeps to ttft:p99:1000 (ms), or another bound.",
            rich_help_panel=options.LOAD,
        ),
    ] = "",
    trial_seconds: Annotated[
        float, typer.Option(help="--find-rate: how long one rate is tried.", rich_help_panel=options.LOAD)
    ] = 30.0,
    precision: Annotated[
        float, typer.Option(help="--find-rate: how exactly, as a share of the rate.", rich_help_panel=options.LOAD)
    ] = 0.05,
    temperature: options.Temperature = 0.0,
    ignore_eos: options.IgnoreEos = True,
    extra_body: Annotated[
        str,
        typer.Option(
            metavar="JSON", help="Further fields of requests, as '{\"top_p\": 0.9}'.", rich_help_panel=options.REQUESTS
        ),
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            help="A request has failed after so many seconds without a byte.", rich_help_panel=options.REQUESTS
        ),
    ] = 600.0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="For goodput: what is quick enough, as ttft:1000 or tpot:50 (ms).", rich_help_panel=options.RESULTS
        ),
    ] = None,
    json_file: options.JsonFile = None,
    save_requests: options.SaveRequests = False,
    plot: options.Plot = None,
) -> None:
    """Measure a server: Pegboard, or any other that has OpenAI's API."""
    check_results(json_file, plot)
    from pegboard.tools.bench.find_rate import Bound
    from pegboard.tools.bench.serve import Measurement, ServeSettings, run_loop
    from pegboard.tools.bench.workloads import Shape

    settings = ServeSettings(
        url=url,
        api=api.value,
        model=model,
        prompt_kind=prompt_kind.value,
        workload=options.workload_name(workload, file),
        shape=Shape(num_prompts or 0, input_len, output_len, range_ratio, groups, prefix_len, turns),
        file=file,
        concurrency=concurrency,
        request_rate=request_rate,
        burstiness=burstiness,
        replay=replay,
        find_rate=Bound.parse(find_rate) if find_rate else (),
        trial_seconds=trial_seconds,
        precision=precision,
        seed=seed,
        repeat=repeat,
        warmup=warmup,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra=options.json_object(extra_body, "--extra-body"),
        slo=options.slo_of(slo or []),
        timeout=timeout,
        wait=wait,
    )
    with progress() as watch:
        measurement = Measurement(
            settings, options.key_of(api_key_file), waiting=lambda: spinner(f"Waiting for {url} ..."), watch=watch
        )
        measured = run_loop(measurement.measure)
    raise typer.Exit(_served(settings, measured, json_file, plot, save_requests=save_requests))


def _served(
    settings: ServeSettings, measured: Measured, file: Path | None, plot: Path | None, *, save_requests: bool
) -> int:
    """Show and write it; the exit code."""
    from pegboard.tools.bench.figures import median

    middle = median(measured.runs) if measured.runs else None
    if file is None or str(file) != "-":
        if settings.find_rate:
            _show_search(settings, measured)
        if middle is not None:
            title = settings.workload if not settings.find_rate else "at the highest rate"
            show_figures(title, measured.runs, middle)
    if file is not None:
        write_results(_as_json(settings, measured, middle, save_requests=save_requests), file)
    if plot is not None:
        _draw(settings, measured, plot)
    for text in measured.notes:
        note(f"note: {text}")
    code = tell_failures(measured.runs, measured.stopped)
    return code or (1 if settings.find_rate and not measured.rates else 0)


def _show_search(settings: ServeSettings, measured: Measured) -> None:
    bounds = ", ".join(map(str, settings.find_rate))
    first = settings.find_rate[0]
    rows = []
    for trial in (one for trials in measured.searches for one in trials):
        values = trial.figures[f"{first.latency}_ms"]
        # One that was ended has figures of those only that came through.
        told = not trial.figures["stopped"] and values is not None
        rows.append(
            (
                f"{trial.rate:.2f}",
                f"{trial.figures['request_throughput']:.2f}" if told else "",
                f"{values[first.statistic]:.0f}" if told else "",
                trial.why or "kept",
            )
        )
    write_table(("requests/s sent", "answered", f"{first.latency.upper()} {first.statistic}, ms", bounds), rows)
    write()
    if measured.rate is None:
        write(f"no rate keeps {bounds}")
    else:
        of = f" (median of {len(measured.rates)})" if len(measured.rates) > 1 else ""
        write(f"highest rate with {bounds}: {measured.rate:.2f} requests/s{of}")
    write()


def _as_json(
    settings: ServeSettings, measured: Measured, middle: dict[str, Any] | None, *, save_requests: bool
) -> dict[str, Any]:
    target = measured.target
    runs = measured.runs
    if save_requests:
        runs = with_records(runs, [(one.start, one.records) for one in measured.outcomes])
    data = head("find-rate" if settings.find_rate else "serve", _settings(settings))
    data["server"] = {
        "url": str(target.client.address),
        "api": target.api.name,
        "prompt_kind": target.kind.value,
        "model": target.wanted.model,
        **target.about,
    }
    data["notes"] = measured.notes
    if settings.find_rate:
        data["rate"] = measured.rate
        data["rates"] = measured.rates
        data["trials"] = [[trial.to_dict() for trial in trials] for trials in measured.searches]
    return {**data, "median": middle, "runs": runs}


def _settings(settings: ServeSettings) -> dict[str, Any]:
    found = dataclasses.asdict(settings)
    found["find_rate"] = [str(bound) for bound in settings.find_rate]
    found["file"] = None if settings.file is None else str(settings.file)
    return found


def _draw(settings: ServeSettings, measured: Measured, folder: Path) -> None:
    from pegboard.tools.bench import pictures

    folder.mkdir(exist_ok=True)
    files = [pictures.draw_runs(measured.outcomes, folder / "serve.png", settings.workload)] if measured.runs else []
    if settings.find_rate:
        files.append(pictures.draw_search(measured.searches, folder / "find-rate.png", settings.find_rate))
    for one in files:
        note(f"picture: {one}")


app.command()(bench_local.offline)
app.command()(bench_local.step)
