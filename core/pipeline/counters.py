"""Totals of a scheduler, always on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import PrefillItem


@dataclass(slots=True)
class Counters:
    """Totals since the start; cheap enough to be always on. Times in seconds."""

    accepted: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    failed_batches: int = 0
    retractions: int = 0
    """Preemptions included."""
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: Counter[str] = field(default_factory=lambda: Counter(host=0, storage=0))
    """Of the cached ones, those that were loaded, by where they came from; these two are told by any engine."""
    generated_tokens: int = 0
    forced_tokens: int = 0
    """Of the generated ones, those that constraints left no choice about and the model was not asked for."""
    book_errors: int = 0
    schedule_time: float = 0.0
    forward_time: float = 0.0
    results_time: float = 0.0

    def note_cached(self, item: PrefillItem) -> None:
        """Count what was found of a request's prompt when it was first scheduled, here and in the request."""
        kv, out = item.req.kv, item.req.output
        out.cached_tokens, out.cached_from = kv.prefix_len, item.loaded_from
        self.cached_tokens += out.cached_tokens
        for origin, count in out.cached_from.items():  # hardly ever any, and `Counter.update` is slow to find that out
            self.cached_from[origin] += count

    def to_dict(self) -> dict[str, float]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cached_from"}
        return {**plain, **{f"cached_{origin}_tokens": count for origin, count in self.cached_from.items()}}
