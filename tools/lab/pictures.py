"""A picture of one or several runs: how long requests waited, what the cache gave, how full the engine was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import ConfigError
from pegboard.tools.lab.report import NOTABLE

if TYPE_CHECKING:
    from pegboard.tools.lab.run import Outcome


def draw(outcomes: Sequence[Outcome], summaries: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a PNG with four panels. Raises ConfigError where matplotlib (the extra `lab`) is missing."""
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
    if any(one["hit_rate"] >= NOTABLE for one in summaries):
        _hit_rates(axes[0][1], summaries)
    else:
        _longest(axes[0][1], outcomes)
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
    optimal = next((one["optimal_hit_rate"] for one in summaries if one["optimal_hit_rate"] is not None), None)
    if optimal is not None:
        ax.axhline(optimal, color="black", linestyle="--", label=f"optimal {optimal:.1%}")
        ax.legend(loc="lower right")
    ax.set(title="Cache hit rate", ylabel="share of prompt tokens", ylim=(0, 1))


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
