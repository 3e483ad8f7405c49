"""Poolers of hidden states after the final norm.

sentence-transformers writes its choice to ``1_Pooling/config.json`` (``pooling_mode_*``), and `auto` honours it. A
model without that file is pooled at its last token, the only one that has seen the whole prompt in a decoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.row_outputs.api import Pooler, PoolerContext, PoolSpan

_FILE = "1_Pooling/config.json"


class LastPooler(Pooler):
    """The last token's hidden state."""

    def rows(self, span: PoolSpan) -> range:
        return range(span.count - 1, span.count) if span.start + span.count == span.length else range(0)

    def first(self, length: int) -> int:
        return length - 1

    def reduce(self, hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        return hidden.float()

    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        return partials[-1]


class ClsPooler(Pooler):
    """The first token's hidden state."""

    def rows(self, span: PoolSpan) -> range:
        return range(1) if span.start == 0 else range(0)

    def first(self, length: int) -> int:
        return 0

    def reduce(self, hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        return hidden.float()

    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        return partials[0]


class MeanPooler(Pooler):
    """The mean of all tokens' hidden states: sums on the device, one per step, added up in float64."""

    def rows(self, span: PoolSpan) -> range:
        return range(span.count)

    def first(self, length: int) -> int:
        return 0

    def reduce(self, hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        sums = torch.zeros(len(spans), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        counts = torch.tensor([span.count for span in spans], device=hidden.device)
        owner = torch.repeat_interleave(torch.arange(len(spans), device=hidden.device), counts)
        return sums.index_add_(0, owner, hidden.float())

    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        total = np.zeros(partials[0].shape, np.float64)
        for partial in partials:
            total += partial
        return (total / length).astype(np.float32)


class ModelPooler(Pooler[NoOptions]):
    """Whichever of the others the model's own files name."""

    def __init__(self, options: NoOptions, ctx: PoolerContext) -> None:
        super().__init__(options, ctx)
        mode = _named(ctx.directory)
        if mode not in _POOLERS:
            raise ValueError(f"{ctx.directory / _FILE} names no mode of pooling that is known here")
        self._pooler = _POOLERS[mode](options, ctx)

    @classmethod
    def supports(cls, options: NoOptions, ctx: PoolerContext) -> str | None:
        mode = _named(ctx.directory)
        if mode is None:
            return f"the model has no {_FILE}"
        return None if mode in _POOLERS else f"the model's {_FILE} names no mode of pooling that is known here"

    def rows(self, span: PoolSpan) -> range:
        return self._pooler.rows(span)

    def first(self, length: int) -> int:
        return self._pooler.first(length)

    def reduce(self, hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        return self._pooler.reduce(hidden, spans)

    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        return self._pooler.combine(partials, length)


_POOLERS: dict[str, type[Pooler]] = {
    "pooling_mode_lasttoken": LastPooler,
    "pooling_mode_mean_tokens": MeanPooler,
    "pooling_mode_cls_token": ClsPooler,
}


def _named(directory: Path) -> str | None:
    """Return the mode that the model's files name, "" for none or several; None without such a file."""
    try:
        settings = json.loads((directory / _FILE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(settings, dict):
        return ""
    modes = [key for key, on in settings.items() if key.startswith("pooling_mode_") and on is True]
    return modes[0] if len(modes) == 1 else ""
