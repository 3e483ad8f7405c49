"""A line in the log for each finished request: where its time went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

logger = logging.getLogger(__name__)


def time_stats(req: Req) -> dict[str, object]:
    """Return times in seconds and counts of a request that has ended. What it never came to (a first token) is left
    out.

    `gates_s` from its arrival until the last gate let it pass, `queue_s` from there until it was first scheduled,
    `prefill_s` until its first token, `decode_s` until its end; `ttft_s` and `e2e_s` are from its arrival until its
    first token and its end. A retracted request's second wait is part of its `decode_s`. `decode_tokens_per_s` counts
    the tokens after the first.
    """
    times, out = req.timing, req.output
    ready = times.ready or times.arrived
    stats: dict[str, object] = {
        "rid": req.name,
        "prompt_tokens": req.input_len,
        "output_tokens": req.output_len,
        "cached_tokens": out.cached_tokens,
        "retractions": out.num_retractions,
        "finish_reason": None if out.finish_reason is None else out.finish_reason.type.value,
    }
    for name, start, end in (
        ("gates_s", times.arrived, times.ready),
        ("queue_s", ready, times.first_scheduled),
        ("prefill_s", times.first_scheduled, times.first_token),
        ("decode_s", times.first_token, times.finished),
        ("ttft_s", times.arrived, times.first_token),
        ("e2e_s", times.arrived, times.finished),
    ):
        if start > 0 and end > 0:
            stats[name] = round(max(0.0, end - start), 6)
    decode = stats.get("decode_s")
    if isinstance(decode, float) and decode > 0 and req.output_len > 1:
        stats["decode_tokens_per_s"] = round((req.output_len - 1) / decode, 3)
    return stats


def log_finished(reqs: Sequence[Req]) -> None:
    """Log a line at info for each of these requests."""
    if not logger.isEnabledFor(logging.INFO):
        return
    for req in reqs:
        stats = time_stats(req)
        shown = {**stats, "rid": quoted(req.name)}
        text = " ".join(f"{name}={value}" for name, value in shown.items())
        logger.info("Finished. %s", text, extra={"event": "request", **stats})
