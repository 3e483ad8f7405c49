"""Pictures of a measurement: how long requests waited, what went on meanwhile, where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import ConfigError

if TYPE_CHECKING:
    from pegboard.tools.bench.find_rate import Bound, Trial
    from pegboard.tools.bench.load import Outcome

BINS = 60
"""Of the time in which a run is shown."""


def check() -> None:
    """Raise ConfigError where matplotlib (the extra `lab`) is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'pegboard[lab]'") from None


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_runs(outcomes: Sequence[Outcome], path: Path, title: str) -> Path:
    """Four panels: TTFT, time between tokens, requests under way and throughput over time. A line per run."""
    figure = _figure(12, 8)
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    for number, outcome in enumerate(outcomes, 1):
        good = [one for one in outcome.records if one.ok]
        label = f"run {number}"
        _shares(axes[0][0], [one.ttft for one in good], label)
        _shares(axes[0][1], [gap for one in good for gap in one.intervals()], label)
        times, under_way = _under_way(outcome)
        axes[1][0].step(times, under_way, where="post", label=label)
        times, rate = _throughput(outcome)
        axes[1][1].step(times, rate, where="post", label=label)
    axes[0][0].set(title="Time to first token", xlabel="ms", ylabel="share of requests", ylim=(0, 1))
    axes[0][1].set(title="Time between tokens", xlabel="ms", ylabel="share of tokens", ylim=(0, 1))
    axes[1][0].set(title="Requests under way", xlabel="seconds", ylabel="requests")
    axes[1][1].set(title="Output", xlabel="seconds", ylabel="tokens per second")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        if len(outcomes) > 1 and ax.lines:
            ax.legend(fontsize="small")
    figure.savefig(path, dpi=80)
    return path


def _shares(ax: Any, seconds: Sequence[float], label: str) -> None:
    if seconds:
        values = np.sort(np.array(seconds)) * 1000
        ax.step(values, np.arange(1, values.size + 1) / values.size, where="post", label=label)


def _under_way(outcome: Outcome) -> tuple[list[float], list[int]]:
    """Return how many requests were under way from each moment on at which that changed."""
    over = [one for one in outcome.records if one.over]
    changes = sorted([*((one.sent, 1) for one in over), *((one.end, -1) for one in over)])
    return [at - outcome.start for at, _ in changes], np.cumsum([by for _, by in changes]).tolist()


def _throughput(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Return tokens per second in equal parts of the run. Where a server does not tell how many came in one piece, each
    piece has an equal share of its answer.
    """
    at: list[float] = []
    tokens: list[float] = []
    for one in outcome.records:
        if one.ok and one.times:
            at += one.times
            tokens += one.counts or [one.output_tokens / len(one.times)] * len(one.times)
    counts, edges = np.histogram(
        np.array(at) - outcome.start, BINS, (0, outcome.duration), weights=np.array(tokens, float)
    )
    return edges[:-1].tolist(), (counts / (outcome.duration / BINS)).tolist()


def draw_search(searches: Sequence[Sequence[Trial]], path: Path, bounds: Sequence[Bound]) -> Path:
    """Return the rates that were tried, and what became of the first bound's figure."""
    figure = _figure(8, 5)
    ax = figure.subplots()
    bound = bounds[0]
    for number, trials in enumerate(searches, 1):
        # One that was ended has figures of those only that came through.
        ran = [one for one in trials if not one.figures["stopped"]]
        told = [(one.rate, one.figures[f"{bound.latency}_ms"], one.kept) for one in ran]
        points = sorted((rate, values[bound.statistic], kept) for rate, values, kept in told if values is not None)
        ax.plot([rate for rate, _, _ in points], [ms for _, ms, _ in points], alpha=0.5, label=f"search {number}")
        for ended in trials:
            if ended not in ran:
                ax.axvline(ended.rate, color=f"C{number - 1}", linestyle=":", alpha=0.5)
        for kept, marker in ((True, "o"), (False, "x")):
            those = [(rate, ms) for rate, ms, one in points if one is kept]
            ax.plot([rate for rate, _ in those], [ms for _, ms in those], marker, color=f"C{number - 1}")
    ax.axhline(bound.ms, color="black", linestyle="--")
    ax.set(title=f"o: {bound}; x: not; dotted: ended early", xlabel="requests per second", ylabel="ms", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=80)
    return path


def draw_stages(stages: Mapping[str, float], path: Path, title: str) -> Path:
    """Return where the time of a step goes, in milliseconds by stage."""
    figure = _figure(9, 1 + 0.35 * len(stages))
    ax = figure.subplots()
    names = list(stages)[::-1]
    bars = ax.barh(names, [stages[name] for name in names])
    ax.bar_label(bars, fmt="{:.3g}")
    ax.set(title=title, xlabel="ms")
    figure.savefig(path, dpi=80)
    return path
