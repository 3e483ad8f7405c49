"""StepReport: the scheduler's log lines about batches, in the words that operators know from other servers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.ahead import LogPart
    from pegboard.core.interfaces.clock import Clock

logger = logging.getLogger(__name__)

_TELLING = 64
"""Tokens of a prefill that says something about the speed of others."""
_NEW = 0.2
"""Weight of the newest step in that speed."""


class StepReport:
    """One line per prefill batch, and one every `interval` decode steps (0: none). All at info.

    `total_tokens` is the pool's size. The figures of a line are also its record's fields, for logs as JSON. A step that
    says nothing costs a comparison and a sum::

        if report.decode_due(counters.generated_tokens):
            report.decode(running=..., queued=..., used_tokens=...)
    """

    def __init__(self, interval: int, clock: Clock = time.monotonic, total_tokens: int = 0) -> None:
        self._interval = interval
        self._clock = clock
        self._total = max(1, total_tokens)
        self._left = 0
        self._since = 0.0
        self._before = 0
        self._generated = 0
        self._totals: dict[str, int] = {}
        self._loaded = Counter[str]()
        self._speed = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Note that a step has computed so many tokens of prompts, beside what else it did."""
        if tokens >= _TELLING and seconds > 0:
            speed = tokens / seconds
            self._speed += (speed - self._speed) * _NEW if self._speed else speed

    def prefill_speed(self) -> float:
        """Return tokens of prompts per second, as steps of late have computed them; 0.0 before the first one."""
        return self._speed

    @property
    def talks(self) -> bool:
        """Whether a prefill's line would be written anywhere, so that figures are not added up for nothing."""
        return logger.isEnabledFor(logging.INFO)

    def prefill(
        self,
        requests: int,
        new_tokens: int,
        cached_tokens: int,
        running: int,
        queued: int,
        used_tokens: int,
        totals: Mapping[str, tuple[str, int]] = MappingProxyType({}),
        loaded: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Count a prefill of `requests`: `new_tokens` were computed, `cached_tokens` found in the cache. `totals` since
        the start are what stages add to the line (`Stage.log_totals`), `loaded` cached tokens by their origin.
        """
        if not self.talks:
            return
        usage = used_tokens / self._total
        hit_rate = cached_tokens / max(1, new_tokens + cached_tokens)
        since = self._since_last(totals)
        came = {origin: total - self._loaded[origin] for origin, total in loaded.items()}
        self._loaded.update(came)
        logger.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, cache hit rate: %.2f, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d%s%s",
            requests, new_tokens, cached_tokens, hit_rate, usage, running, queued,
            "".join(f", {label}: {since[field]}" for label, (field, _) in totals.items()),
            "".join(f", #{origin}-token: {count}" for origin, count in came.items()),
            extra={
                "event": "prefill",
                "new_requests": requests,
                "new_tokens": new_tokens,
                "cached_tokens": cached_tokens,
                "hit_rate": round(hit_rate, 4),
                "token_usage": round(usage, 4),
                "running": running,
                "queued": queued,
                **since,
                **{f"cached_{origin}": count for origin, count in came.items()},
            },
        )  # fmt: skip

    def _since_last(self, totals: Mapping[str, tuple[str, int]]) -> dict[str, int]:
        """Return by how much each total has grown since the last line, by its field."""
        before, self._totals = self._totals, dict(totals.values())
        return {field: total - before.get(field, 0) for field, total in self._totals.items()}

    def decode_due(self, generated_tokens: int) -> bool:
        """Count a decode step; whether it is time for a line. `generated_tokens` is the total since the start."""
        if self._left > 1:
            self._left -= 1
            return False
        if self._interval <= 0:
            return False
        if self._left == 0:
            # The first step of a busy time only starts the clock: what came before was no decoding.
            self._left = self._interval
            self._since, self._before = self._clock(), generated_tokens
            return False
        self._generated = generated_tokens
        return True

    def decode(self, running: int, queued: int, used_tokens: int, parts: Sequence[LogPart] = ()) -> None:
        """Write the line that is due, about the time since the last one, with what stages add to it."""
        now = self._clock()
        took = now - self._since
        throughput = (self._generated - self._before) / took if took > 0 else 0.0
        self._since, self._before = now, self._generated
        self._left = self._interval
        usage = used_tokens / self._total
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.2f, "
            "#queue-req: %d%s",
            running, used_tokens, usage, throughput, queued,
            "".join(part.text for part in parts),
            extra={
                "event": "decode",
                "running": running,
                "used_tokens": used_tokens,
                "token_usage": round(usage, 4),
                "gen_throughput": round(throughput, 3),
                "queued": queued,
                **{name: value for part in parts for name, value in part.fields.items()},
            },
        )  # fmt: skip

    def rest(self) -> None:
        """Note that the scheduler has run out of work: the time until there is some again counts for no throughput."""
        self._left = 0
