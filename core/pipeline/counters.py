"""Totals of a scheduler, always on."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    encode_steps: int = 0
    """Steps that encoded media."""
    encode_time: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    """Of the cached ones, those that came from the host."""
    cached_storage_tokens: int = 0
    """Of the cached ones, those that a storage had and the host did not."""
    generated_tokens: int = 0
    forced_tokens: int = 0
    """Of the generated ones, those that grammars left no choice about and the model was not asked for."""
    grammar_waits: int = 0
    """Times that a request sat out steps, because its grammar takes long to follow."""
    book_errors: int = 0
    schedule_time: float = 0.0
    forward_time: float = 0.0
    results_time: float = 0.0

    def note_cached(self, item: PrefillItem) -> None:
        """Count what was found of a request's prompt when it was first scheduled, here and in the request."""
        kv, out = item.req.kv, item.req.output
        out.cached_tokens = kv.prefix_len
        out.cached_storage = item.stored_len
        out.cached_host = kv.prefix_len - kv.cache_len - item.stored_len
        self.cached_tokens += out.cached_tokens
        self.cached_host_tokens += out.cached_host
        self.cached_storage_tokens += out.cached_storage

    def to_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
