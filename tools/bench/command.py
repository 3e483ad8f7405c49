"""``pegboard bench``: how fast a server, an engine in this process, or one step of it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.toolkit.system.output import note, spinner, write, write_table
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
from pegboard.tools.option_groups import with_option_groups

if TYPE_CHECKING:
    from pegboard.tools.bench.serve import Measured, ServeSettings

app = typer.Typer(no_args_is_help=True, help="Measure the speed of a server, an engine, or single steps.")


@app.command()
@with_option_groups
def serve(
    *,
    server: options.ServerOptions,
    workload: options.WorkloadOptions,
    arrivals: options.ArrivalOptions,
    runs: options.RunOptions,
    search: options.SearchOptions,
    requests: options.RequestOptions,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="Limit for goodput, such as ttft:1000 or tpot:50 (ms).", rich_help_panel=options.RESULTS),
    ] = None,
    results: options.ResultOptions,
) -> None:
    """Measure a server: Pegboard, or any other with OpenAI's API."""
    check_results(results.json_file, results.plot)
    from pegboard.tools.bench.serve import Measurement, run_loop

    settings = _serve_settings(server, workload, arrivals, runs, search, requests, options.slo_of(slo or []))
    with progress() as watch:
        measurement = Measurement(
            settings, server.key, waiting=lambda: spinner(f"Waiting for {server.url} ..."), watch=watch
        )
        measured = run_loop(measurement.measure)
    _report(settings, measured, results)
    code = tell_failures(measured.runs, measured.stopped)
    raise typer.Exit(code or (1 if settings.find_rate and not measured.rates else 0))


def _serve_settings(
    server: options.ServerOptions,
    workload: options.WorkloadOptions,
    arrivals: options.ArrivalOptions,
    runs: options.RunOptions,
    search: options.SearchOptions,
    requests: options.RequestOptions,
    slo: Mapping[str, float],
) -> ServeSettings:
    from pegboard.tools.bench.find_rate import Bound
    from pegboard.tools.bench.serve import ServeSettings

    return ServeSettings(
        url=server.url,
        api=server.api.value,
        model=server.model,
        prompt_kind=workload.prompt_kind.value,
        workload=workload.name,
        shape=workload.shape(workload.num_prompts or 0),
        file=workload.file,
        concurrency=arrivals.concurrency,
        request_rate=arrivals.request_rate,
        burstiness=arrivals.burstiness,
        replay=arrivals.replay,
        find_rate=Bound.parse(search.find_rate) if search.find_rate else (),
        trial_seconds=search.trial_seconds,
        precision=search.precision,
        seed=workload.seed,
        repeat=runs.repeat,
        warmup=runs.warmup,
        temperature=requests.temperature,
        ignore_eos=requests.ignore_eos,
        extra=options.json_object(requests.extra_body, "--extra-body"),
        slo=slo,
        timeout=requests.timeout,
        wait=server.wait,
    )


def _report(settings: ServeSettings, measured: Measured, results: options.ResultOptions) -> None:
    """Show what was measured, write it and draw it."""
    from pegboard.tools.bench.figures import median

    middle = median(measured.runs) if measured.runs else None
    if not results.prints_json:
        if settings.find_rate:
            _show_search(settings, measured)
        if middle is not None:
            title = settings.workload if not settings.find_rate else "at the highest rate"
            show_figures(title, measured.runs, middle)
    if results.json_file is not None:
        write_results(_as_json(settings, measured, middle, save_requests=results.save_requests), results.json_file)
    if results.plot is not None:
        _draw(settings, measured, results.plot)
    for text in measured.notes:
        note(f"note: {text}")


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
