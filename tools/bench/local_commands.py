"""``pegboard bench offline`` and ``pegboard bench step``: an engine in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.config import Files, Overrides
from pegboard.toolkit.system.output import note, quiet_logging, spinner, write, write_table
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
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.engine.engine import Engine
    from pegboard.tools.bench.load import Outcome
    from pegboard.tools.bench.offline import OfflineBench, OfflineSettings


_Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Requests at a time; all at once by default.", rich_help_panel=options.LOAD),
]
_Stream = Annotated[
    bool,
    typer.Option("--stream", help="Read each token as it comes, for latencies.", rich_help_panel=options.REQUESTS),
]


@with_option_groups
def offline(
    *,
    files: Files = None,
    overrides: Overrides = None,
    workload: options.WorkloadOptions,
    concurrency: _Concurrency = None,
    runs: options.RunOptions,
    answers: options.AnswerOptions,
    stream: _Stream = False,
    results: options.ResultOptions,
) -> None:
    """Measure an engine in this process, without HTTP."""
    check_results(results.json_file, results.plot)
    from pegboard.core.config.compose import compose
    from pegboard.tools.bench.files import read_lines
    from pegboard.tools.bench.offline import OfflineBench, OfflineSettings
    from pegboard.tools.signals import Signals

    lines = None if workload.file is None else read_lines(workload.file)
    settings = OfflineSettings(
        workload=workload.name,
        shape=workload.shape(workload.num_prompts or len(lines or ()) or options.DEFAULT_REQUESTS),
        file=workload.file,
        prompt_kind=workload.prompt_kind.value,
        concurrency=concurrency,
        stream=stream,
        seed=workload.seed,
        repeat=runs.repeat,
        warmup=runs.warmup,
        temperature=answers.temperature,
        ignore_eos=answers.ignore_eos,
    )
    with Signals() as signals, _engine(compose(files or (), overrides=overrides or ())) as engine:
        bench = OfflineBench(engine, settings, lines)
        signals.gentle()
        outcomes, found = _runs(bench, settings, lambda: signals.stopped)
        about = _about(engine)
    _report(settings, outcomes, found, about, results)
    raise typer.Exit(tell_failures(found, outcomes[-1].stopped))


def _report(
    settings: OfflineSettings,
    outcomes: list[Outcome],
    runs: list[dict[str, Any]],
    about: dict[str, Any],
    results: options.ResultOptions,
) -> None:
    """Show what was measured, write it and draw it."""
    from pegboard.tools.bench.figures import median

    middle = median(runs)
    if not results.prints_json:
        show_figures(settings.workload, runs, middle)
        write()
        _show_steps(middle["steps"])
    if results.json_file is not None:
        if results.save_requests:
            runs = with_records(runs, [(one.start, one.records) for one in outcomes])
        said = {**dataclasses.asdict(settings), "file": None if settings.file is None else str(settings.file)}
        write_results({**head("offline", said), "engine": about, "median": middle, "runs": runs}, results.json_file)
    if results.plot is not None:
        from pegboard.tools.bench import pictures

        results.plot.mkdir(exist_ok=True)
        note(f"picture: {pictures.draw_runs(outcomes, results.plot / 'offline.png', settings.workload)}")


def _runs(
    bench: OfflineBench, settings: OfflineSettings, stopped: Callable[[], bool]
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    from pegboard.tools.bench.figures import figures
    from pegboard.tools.bench.workloads import WARM_UP_RUN

    outcomes: list[Outcome] = []
    runs: list[dict[str, Any]] = []
    with progress() as watch:
        if settings.warmup:
            bench.run(bench.sessions(WARM_UP_RUN, dataclasses.replace(settings.shape, requests=settings.warmup)))
        for number in range(settings.repeat):
            sessions = bench.sessions(number, settings.shape)
            title = f"run {number + 1} of {settings.repeat}" if settings.repeat > 1 else ""
            outcome, steps = bench.run(sessions, watch(title, settings.shape.requests), stopped)
            found = figures(outcome)
            if not settings.stream:
                found |= {"ttft_ms": None, "tpot_ms": None, "itl_ms": None}
            outcomes.append(outcome)
            runs.append({**found, "steps": steps})
            if outcome.stopped:
                break
    return outcomes, runs


def _show_steps(steps: dict[str, Any]) -> None:
    rows = [
        (name, f"{seconds:.2f}", f"{steps['share'][name]:.1%}", f"{steps['ms_per_step'][name]:.3f}")
        for name, seconds in steps["seconds"].items()
    ]
    count = f"{steps['prefill_steps']:g} prefills, {steps['decode_steps']:g} decodes"
    if "encode_steps" in steps:
        count = f"{count}, {steps['encode_steps']:g} encodings"
    inside = steps["forward_seconds"]
    rows += [(f"  forward: {name}", f"{seconds:.2f}", "", "") for name, seconds in inside.items()]
    write_table((f"steps: {count}", "s", "share", "ms per step"), rows)


def step(
    files: Files = None,
    overrides: Overrides = None,
    mode: Annotated[options.StepMode, typer.Option(help="What the step computes.")] = options.StepMode.DECODE,
    batch: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 1,
    context: Annotated[int, typer.Option(min=0, help="Tokens that each request already has.")] = 128,
    extend: Annotated[int, typer.Option(min=1, help="prefill, mixed: new tokens of a prompt.")] = 512,
    images: Annotated[int, typer.Option(min=0, help="prefill, mixed: new pictures of a prompt.")] = 0,
    image_size: options.ImageSizeText = "1024x1024",
    repetitions: Annotated[int, typer.Option(min=1, help="Steps that are measured.")] = 30,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 5,
    seed: options.Seed = 0,
    json_file: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Measure one step of the engine: one batch of a given shape, stage by stage."""
    check_results(json_file, plot)
    from pegboard.tools.bench.images import ImageSize
    from pegboard.tools.bench.step import StepBench, StepSettings, resolve

    size = ImageSize.parse(image_size)
    settings = StepSettings(mode.value, batch, context, extend, repetitions, warmup, seed, images, size)
    with _engine(resolve(settings, files or (), overrides or ())) as engine:
        bench = StepBench(engine, settings)
        with _steps(settings.steps) as watch:
            found = bench.run(watch).figures()
        about = _about(engine)
    if json_file is None or str(json_file) != "-":
        _show_step(str(settings), found)
    if json_file is not None:
        write_results({**head("step", dataclasses.asdict(settings)), "engine": about, "step": found}, json_file)
    if plot is not None:
        from pegboard.tools.bench import pictures

        plot.mkdir(exist_ok=True)
        stages = {name: one["median"] for name, one in found["stages_ms"].items()}
        stages |= {f"forward: {name}": one["median"] for name, one in found["forward_ms"].items()}
        note(f"picture: {pictures.draw_stages(stages, plot / 'step.png', str(settings))}")


def _show_step(title: str, found: dict[str, Any]) -> None:
    whole = found["total_ms"]["median"]

    def row(name: str, values: dict[str, float]) -> tuple[str, ...]:
        return name, f"{values['median']:.3f}", f"{values['min']:.3f}", f"{values['median'] / whole:.1%}"

    rows = []
    for name, values in found["stages_ms"].items():
        rows.append(row(name, values))
        if name == "forward":
            rows += [row(f"  {inner}", one) for inner, one in found["forward_ms"].items()]
    rows.append(row("whole step", found["total_ms"]))
    write_table((title, "median ms", "min ms", "share"), rows)
    write()
    write(f"{found['tokens']} tokens per step, {found['tokens_per_s']:.0f} tok/s; {found['repetitions']} repetitions")


@contextlib.contextmanager
def _engine(resolved: ResolvedConfig) -> Iterator[Engine]:
    quiet_logging(resolved.engine.log_level)
    with spinner(f"Loading {resolved.engine.model.path} ..."):
        from pegboard.core.engine.engine import Engine

        engine = Engine(resolved)
    with engine:
        yield engine


@contextlib.contextmanager
def _steps(total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on a terminal."""
    import time

    from pegboard.tools.bench.load import Progress

    with progress() as watch:
        watcher, began = watch("steps", total), time.perf_counter()
        if watcher is None:
            yield None
            return
        tell = watcher
        yield lambda done: tell(Progress(total, done, 0, done, time.perf_counter() - began))


def _about(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "model": info.served_name,
        "path": info.path,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "vocab_size": info.vocab_size,
        "max_total_tokens": info.max_total_tokens,
        "weight_bytes": engine.built.runner.weight_bytes(),
        "providers": dict(info.providers),
    }
