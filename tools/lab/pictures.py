"""A picture of one or several runs: how long requests waited, what the cache gave and from where, how full the engine
was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import ConfigError
from pegboard.tools.lab.report import NOTABLE, TIERS

if TYPE_CHECKING:
    from pegboard.tools.lab.run import Outcome


def draw(outcomes: Sequence[Outcome], summaries: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a PNG with four panels; where some run has tiers, one of them relates its runs by TTFT, in the place of the
    queue. Raises ConfigError where matplotlib (the extra `lab`) is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'pegboard[lab]'") from None
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    _ttft(axes[0][0], outcomes)
    tiers = any(outcome.tiers is not None for outcome in outcomes)
    if tiers:
        _tiers(axes[0][1], summaries)
    elif any(one["hit_rate"] >= NOTABLE for one in summaries):
        _hit_rates(axes[0][1], summaries)
    else:
        _longest(axes[0][1], outcomes)
    if tiers:
        _ttft_by_run(axes[1][0], summaries)
    else:
        _queue(axes[1][0], outcomes)
    _memory(axes[1][1], outcomes)
    figure.savefig(path, dpi=80)


def _ttft(ax: Any, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        times = np.sort([r.first_token - r.arrived for r in outcome.records if r.first_token > 0])
        if times.size:
            ax.step(times, np.arange(1, times.size + 1) / times.size, label=outcome.label, where="post")
    ax.set(title="Time to first token", xlabel="seconds", ylabel="share of requests", ylim=(0, 1))
    ax.grid(alpha=0.3)
    ax.legend()


def _hit_rates(ax: Any, summaries: Sequence[dict[str, Any]]) -> None:
    labels = [one["label"] for one in summaries]
    bars = ax.bar(labels, [one["hit_rate"] for one in summaries], color=[f"C{i}" for i in range(len(labels))])
    ax.bar_label(bars, fmt="{:.1%}", label_type="center")
    if _optimal(ax, summaries):
        ax.legend(loc="lower right")
    ax.set(title="Cache hit rate", ylabel="share of prompt tokens", ylim=(0, 1))


def _optimal(ax: Any, summaries: Sequence[dict[str, Any]]) -> bool:
    """Draw a line at the best possible hit rate; whether that is known."""
    optimal = next((one["optimal_hit_rate"] for one in summaries if one["optimal_hit_rate"] is not None), None)
    if optimal is not None:
        ax.axhline(optimal, color="black", linestyle="--", label=f"optimal {optimal:.1%}")
    return optimal is not None


def _tiers(ax: Any, summaries: Sequence[dict[str, Any]]) -> None:
    """Stack what each tier gave. All that a run without tiers has found was on the device."""
    places, below = np.arange(len(summaries)), np.zeros(len(summaries))
    for key, tier in TIERS.items():
        shares = np.array([one.get(key, one["hit_rate"] if tier == "device" else 0.0) for one in summaries])
        if not shares.any():
            continue
        bars = ax.bar(places, shares, bottom=below, label=tier)
        ax.bar_label(bars, [f"{share:.0%}" if share >= 0.02 else "" for share in shares], label_type="center")
        below += shares
    _optimal(ax, summaries)
    _runs(ax, summaries)
    ax.set(title="Cache hit rate, by tier", ylabel="share of prompt tokens", ylim=(0, 1))
    ax.legend(loc="lower left", ncols=2, fontsize="small")


def _ttft_by_run(ax: Any, summaries: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for name in ("p50", "p95", "p99"):
        ax.plot([one["ttft"][name] for one in summaries], marker="o", label=name)
    _runs(ax, summaries)
    ax.set(title="Time to first token, by run", ylabel="seconds", yscale="log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(alpha=0.3)
    ax.legend()


def _runs(ax: Any, summaries: Sequence[dict[str, Any]]) -> None:
    """Name the runs along the axis, smaller or slanted where there is little room for them."""
    labels = [one["label"].replace(" + ", "\n+ ") for one in summaries]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    width = longest * len(labels)
    size = "small" if width < 80 else "x-small"
    ax.set_xticks(range(len(labels)), labels, rotation=0 if width < 90 else 20, fontsize=size)


def _longest(ax: Any, outcomes: Sequence[Outcome]) -> None:
    """Where nothing is shared there is no hit rate to show; the longest waits say more."""
    priorities = sorted({record.priority for outcome in outcomes for record in outcome.records})
    width = 0.8 / len(priorities)
    for index, priority in enumerate(priorities):
        longest = [
            max((r.scheduled - r.arrived for r in outcome.records if r.priority == priority and r.scheduled), default=0)
            for outcome in outcomes
        ]
        places = np.arange(len(outcomes)) + (index - (len(priorities) - 1) / 2) * width
        ax.bar_label(ax.bar(places, longest, width, label=f"priority {priority}"), fmt="{:.0f}")
    ax.set_xticks(range(len(outcomes)), [outcome.label for outcome in outcomes])
    ax.set(title="Longest queue time", ylabel="seconds")
    ax.legend()


def _queue(ax: Any, outcomes: Sequence[Outcome]) -> None:
    for index, outcome in enumerate(outcomes):
        line = outcome.timeline
        ax.plot(line[:, 0], line[:, 2], color=f"C{index}", label=f"{outcome.label}: waiting")
        ax.plot(line[:, 0], line[:, 1], color=f"C{index}", linestyle=":", label=f"{outcome.label}: running")
    ax.set(title="Requests waiting and running", xlabel="seconds", ylabel="requests")
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")


def _memory(ax: Any, outcomes: Sequence[Outcome]) -> None:
    for index, outcome in enumerate(outcomes):
        line = outcome.timeline
        ax.plot(line[:, 0], line[:, 3] / outcome.total_tokens, color=f"C{index}", label=outcome.label)
    ax.set(title="KV memory in use (held or locked)", xlabel="seconds", ylabel="share of the pool", ylim=(0, 1.02))
    ax.grid(alpha=0.3)
    ax.legend()
