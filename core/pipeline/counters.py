"""Totals of a scheduler, always on."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
    generated_tokens: int = 0
    forced_tokens: int = 0
    """Of the generated ones, those that grammars left no choice about and the model was not asked for."""
    grammar_waits: int = 0
    """Times that a request sat out steps, because its grammar takes long to follow."""
    book_errors: int = 0
    schedule_time: float = 0.0
    forward_time: float = 0.0
    results_time: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
