"""``pegboard simulate WORKLOAD``: the policy lab."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.config import Overrides
from pegboard.toolkit.system.output import check_writable, write, write_json, write_table
from pegboard.tools.option_groups import with_option_groups

if TYPE_CHECKING:
    from pegboard.tools.lab.cost import CostModel
    from pegboard.tools.lab.run import Outcome, Simulation

WORKLOAD_HELP = (
    "shared-prefix, random, chat or agents, with parameters as in 'shared-prefix:groups=32,system=1024', "
    "or the path of a .jsonl trace."
)


@dataclass(frozen=True)
class VariantOptions:
    """The runs to compare."""

    compare: Annotated[
        str | None, typer.Option(help="Make one run per value: 'scheduler.policy.use=fcfs,lpm'.", metavar="KEY=A,B,...")
    ] = None
    runs: Annotated[
        list[str] | None,
        typer.Option(
            "--run", help="Make one run, with a label: 'lpm: scheduler.policy.use=lpm'.", metavar="LABEL: K=V ..."
        ),
    ] = None

    def labelled(self) -> list[tuple[str, list[str]]]:
        """Return labels and overrides of all runs; one without either by default. Raise ConfigError for broken ones."""
        from pegboard.core.interfaces.errors import ConfigError

        found = []
        if self.compare:
            key, equals, values = self.compare.partition("=")
            if not equals or not all(values.split(",")):
                raise ConfigError(f"--compare: {self.compare!r} is not KEY=A,B,...")
            found += [(value, [f"{key}={value}"]) for value in values.split(",")]
        for run in self.runs or ():
            label, colon, settings = run.partition(":")
            if not colon or not label.strip():
                raise ConfigError(f"--run: {run!r} is not LABEL: KEY=VALUE ...")
            found.append((label.strip(), settings.split()))
        return found or [("run", [])]


@dataclass(frozen=True)
class LoadOptions:
    """The requests to make, and how they arrive."""

    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 1000
    rate: Annotated[float, typer.Option(help="Arrivals per second, on average; inf: all at once.")] = 8.0
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0

    def check(self) -> None:
        """Raise ConfigError for a rate that no run can have."""
        from pegboard.core.interfaces.errors import ConfigError

        if not self.rate > 0 or math.isnan(self.rate):
            raise ConfigError(f"--rate must be above 0, got {self.rate}")


@dataclass(frozen=True)
class DeviceOptions:
    """What is modelled."""

    cost: Annotated[str, typer.Option(help="Cost model: a name, or a .yaml or .json file.")] = "cpu-smollm2"
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            help="Speeds of a tier in GB/s, and seconds a move: 'host:read=25,write=25', 'files:read=2,latency=0.001', "
            "of a storage also the bytes that it keeps; may be given again.",
            metavar="NAME:K=N,...",
        ),
    ] = None
    accept: Annotated[
        str | None,
        typer.Option(help="Draft tokens, and accept them at these rates by depth: 0.8,0.6,0.5.", metavar="RATES"),
    ] = None

    def cost_model(self) -> CostModel:
        """Return the cost model with what is said of tiers. Raises ConfigError."""
        from pegboard.tools.lab.cost import load_cost

        model = load_cost(self.cost)
        for tier in self.tiers or ():
            model = model.with_tier(tier)
        return model

    def rates(self) -> tuple[float, ...]:
        """Return how often drafts are accepted, by depth; none where nothing is drafted. Raises ConfigError."""
        from pegboard.tools.lab.drafts import parse_rates

        return () if self.accept is None else parse_rates(self.accept)


@with_option_groups
def simulate(
    *,
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    files: Annotated[
        list[Path] | None, typer.Option("--config", help="A config file, as for `serve`; may be given again.")
    ] = None,
    overrides: Overrides = None,
    load: LoadOptions,
    device: DeviceOptions,
    variants: VariantOptions,
    optimal: Annotated[bool, typer.Option(help="Compute the best possible hit rate (takes memory).")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file; - prints.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
) -> None:
    """Run the real scheduler against a modelled device, in virtual time.

    Policies, caches, memory and gates are those of the config; no model is loaded.
    """
    from pegboard.tools.lab.report import summarise

    for path, option in ((json_file, "--json"), (png, "--png")):
        if path is not None and str(path) != "-":
            check_writable(path, option)
    runs = _simulations(workload, files or [], overrides or [], variants, load, device, optimal)
    outcomes = [_run(one, load.requests) for one in runs]
    summaries = [summarise(one) for one in outcomes]
    _write(summaries, json_file)
    if png is not None:
        from pegboard.tools.lab.pictures import draw

        draw(
            outcomes,
            summaries,
            png,
            f"{workload}, {load.requests} requests at {load.rate:g}/s, cost model {device.cost}",
        )
        if json_file is None or str(json_file) != "-":
            write(f"picture: {png}")


def _write(summaries: Sequence[dict[str, Any]], json_file: Path | None) -> None:
    """Print a table, or JSON where that is to go to stdout; write JSON to any other file."""
    from pegboard.tools.lab.report import table

    if json_file is not None and str(json_file) == "-":
        write_json(summaries)
        return
    write_table(("", *(one["label"] for one in summaries)), table(summaries))
    if json_file is not None:
        json_file.write_text(json.dumps(summaries, indent=2) + "\n", "utf-8")


def _simulations(
    text: str,
    files: list[Path],
    overrides: list[str],
    variants: VariantOptions,
    load: LoadOptions,
    device: DeviceOptions,
    optimal: bool,
) -> list[Simulation]:
    from pegboard.tools.lab.assemble import resolve
    from pegboard.tools.lab.run import Simulation
    from pegboard.tools.lab.workloads import WorkloadChoice

    labelled = variants.labelled()
    load.check()
    choice, cost, rates = WorkloadChoice.parse(text), device.cost_model(), device.rates()
    return [
        Simulation(
            label,
            resolve(files, [*overrides, *more]),
            choice.build(load.requests, load.rate, load.seed),
            cost,
            optimal=optimal,
            rates=rates,
        )
        for label, more in labelled
    ]


def _run(simulation: Simulation, requests: int) -> Outcome:
    """With a progress bar, where a person watches."""
    if not sys.stderr.isatty():
        return simulation.run()
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(simulation.label, total=requests)
        return simulation.run(lambda done: progress.update(task, completed=done))
