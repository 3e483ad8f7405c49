"""``pegboard simulate WORKLOAD``: the policy lab."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.cli.config import Overrides
from pegboard.core.cli.output import check_writable, write, write_json, write_table

if TYPE_CHECKING:
    from pegboard.tools.lab.run import Outcome, Simulation

WORKLOAD_HELP = (
    "shared-prefix, random, chat or agents, with parameters as in 'shared-prefix:groups=32,system=1024', "
    "or the path of a .jsonl trace."
)


def simulate(
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    files: Annotated[
        list[Path] | None, typer.Option("--config", help="A config file, as for `serve`; may be given again.")
    ] = None,
    overrides: Overrides = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests to make.")] = 1000,
    rate: Annotated[float, typer.Option(help="Arrivals per second, on average; inf: all at once.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    cost: Annotated[str, typer.Option(help="Cost model: a name, or a .yaml or .json file.")] = "cpu-smollm2",
    compare: Annotated[
        str | None, typer.Option(help="One run per value: 'scheduler.policy.use=fcfs,lpm'.", metavar="KEY=A,B,...")
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--run", help="One run, with its label: 'lpm: scheduler.policy.use=lpm'.", metavar="LABEL: K=V ..."
        ),
    ] = None,
    optimal: Annotated[bool, typer.Option(help="Reckon the best possible hit rate (takes memory).")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file; - prints.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
) -> None:
    """Run the real scheduler against a modelled device, in virtual time.

    Policies, caches, memory and gates are those that the config chooses; no model is loaded.
    """
    from pegboard.tools.lab.report import summarise, table

    for path, option in ((json_file, "--json"), (png, "--png")):
        if path is not None and str(path) != "-":
            check_writable(path, option)
    runs = _simulations(
        workload, files or [], overrides or [], _variants(compare, variants or []), requests, rate, seed, cost, optimal
    )
    outcomes = [_run(one, requests) for one in runs]
    summaries = [summarise(one) for one in outcomes]
    if json_file is not None and str(json_file) == "-":
        write_json(summaries)
    else:
        write_table(("", *(one["label"] for one in summaries)), table(summaries))
        if json_file is not None:
            import json

            json_file.write_text(json.dumps(summaries, indent=2) + "\n", "utf-8")
    if png is not None:
        from pegboard.tools.lab.pictures import draw

        draw(outcomes, summaries, png, f"{workload}, {requests} requests at {rate:g}/s, cost model {cost}")
        if json_file is None or str(json_file) != "-":
            write(f"picture: {png}")


def _simulations(
    text: str,
    files: list[Path],
    overrides: list[str],
    variants: list[tuple[str, list[str]]],
    requests: int,
    rate: float,
    seed: int,
    cost_name: str,
    optimal: bool,
) -> list[Simulation]:
    from pegboard.core.interfaces.errors import ConfigError
    from pegboard.tools.lab.assemble import resolve
    from pegboard.tools.lab.cost import load_cost
    from pegboard.tools.lab.run import Simulation
    from pegboard.tools.lab.workloads import WorkloadChoice

    if not rate > 0 or math.isnan(rate):
        raise ConfigError(f"--rate must be above 0, got {rate}")
    choice, cost = WorkloadChoice.parse(text), load_cost(cost_name)
    return [
        Simulation(
            label, resolve(files, [*overrides, *more]), choice.build(requests, rate, seed), cost, optimal=optimal
        )
        for label, more in variants
    ]


def _variants(compare: str | None, runs: list[str]) -> list[tuple[str, list[str]]]:
    """Labels and overrides of all runs that are asked for; one without either by default."""
    from pegboard.core.interfaces.errors import ConfigError

    found = []
    if compare:
        key, equals, values = compare.partition("=")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--compare: {compare!r} is not KEY=A,B,...")
        found += [(value, [f"{key}={value}"]) for value in values.split(",")]
    for run in runs:
        label, colon, settings = run.partition(":")
        if not colon or not label.strip():
            raise ConfigError(f"--run: {run!r} is not LABEL: KEY=VALUE ...")
        found.append((label.strip(), settings.split()))
    return found or [("run", [])]


def _run(simulation: Simulation, requests: int) -> Outcome:
    """With a progress bar, where somebody watches."""
    if not sys.stderr.isatty():
        return simulation.run()
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(simulation.label, total=requests)
        return simulation.run(lambda done: progress.update(task, completed=done))
