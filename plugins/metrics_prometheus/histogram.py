"""Histogram: counts per bucket in an array, filled by whole batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Histogram:
    """Values by upper bound, inclusive as Prometheus has it; the last bucket has none.

    A batch of values costs three numpy calls, whatever its size; prometheus_client's own would cost a lock and a Python
    loop for each value.
    """

    __slots__ = ("_bounds", "_counts", "_list", "_more", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self._list = [float(bound) for bound in bounds]
        self._bounds = np.array(self._list)
        self._counts = np.zeros(len(self._list) + 1, np.int64)
        self._more = [0] * (len(self._list) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._more[bisect_left(self._list, value)] += 1
        self._total += value

    def observe_many(self, values: NDArray[np.float64]) -> None:
        """Take float64 [n]; NaN stands for no value."""
        total = float(np.add.reduce(values))
        if total != total:
            values = values[values == values]
            total = float(np.add.reduce(values))
        self._counts += np.bincount(self._bounds.searchsorted(values), minlength=self._counts.shape[0])
        self._total += total

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many values up to it), the last one "+Inf" and all."""
        names = [*map(repr, self._list), "+Inf"]
        counts = (int(many) + one for many, one in zip(self._counts, self._more, strict=True))
        return list(zip(names, map(float, accumulate(counts)), strict=True))

    @property
    def total(self) -> float:
        """The values' sum."""
        return self._total
