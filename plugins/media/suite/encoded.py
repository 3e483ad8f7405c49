"""The suite of MediaProcessor: items that requests have encoded themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import Options
from pegboard.plugins.media.api import MediaItem, MediaProcessor, MediaShape
from pegboard.plugins.media.suite.base import ProcessorSuite, encode


class EncodedTests(ProcessorSuite):
    """The shape of what was encoded elsewhere follows from its grid, its times and the number of its states."""

    contract = "media_processor"

    def with_tokens(self, processor: MediaProcessor[Options], folder: Path) -> Iterator[tuple[MediaItem, int]]:
        """Yield an item of every good file, and how many tokens it has."""
        for kind, items in sorted(self.items(processor, folder).items()):
            for item in items:
                ids, _ = self.prompt([1, kind, 1], {kind: [item]})
                layout = processor.lay_out(ids, [item], encode)
                yield item, sum(span.count for span in layout.spans)

    @capability("encoded")
    def test_encoded_items_have_the_shape_of_prepared_ones(
        self, processor: MediaProcessor[Options], tmp_path: Path
    ) -> None:
        for item, tokens in self.with_tokens(processor, tmp_path):
            shape = processor.shape_of(item.kind, item.grid, item.times, tokens)
            assert shape == MediaShape(item.shape, item.grid, item.pieces, item.times)

    @capability("encoded")
    def test_numbers_that_do_not_belong_together_are_refused(
        self, processor: MediaProcessor[Options], tmp_path: Path
    ) -> None:
        for item, tokens in self.with_tokens(processor, tmp_path):
            self.refuses_shape(processor, item, tokens=tokens + 1)
            self.refuses_shape(processor, item, tokens=tokens - 1)
            steps, height, width = item.grid
            for grid in ((0, height, width), (steps, -height, -width), (steps, height, 0), (steps, 2 * height, width)):
                self.refuses_shape(processor, item, tokens=tokens, grid=grid)
            self.refuses_shape(processor, item, tokens=tokens, times=(*item.times, 1.0))
            for wrong in (math.nan, math.inf, -1.0) if item.times else ():
                for place in {0, len(item.times) - 1}:
                    times = (*item.times[:place], wrong, *item.times[place + 1 :])
                    self.refuses_shape(processor, item, tokens=tokens, times=times)

    @capability("encoded")
    def test_large_grids_cost_nothing(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        """They come from clients, and nothing has been made of them yet."""
        for item, tokens in self.with_tokens(processor, tmp_path):
            for grid in ((1, 1 << 40, 1 << 40), (1 << 60, 2, 2)):
                self.refuses_shape(processor, item, tokens=tokens, grid=grid)

    @lacks("encoded")
    def test_encoded_items_are_refused(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        for item, tokens in self.with_tokens(processor, tmp_path):
            with pytest.raises(InvalidRequest):
                processor.shape_of(item.kind, item.grid, item.times, tokens)

    def refuses_shape(
        self,
        processor: MediaProcessor[Options],
        item: MediaItem,
        *,
        tokens: int,
        grid: tuple[int, int, int] | None = None,
        times: tuple[float, ...] | None = None,
    ) -> None:
        """Fail where an item of these numbers is taken."""
        with pytest.raises(InvalidRequest) as caught:
            processor.shape_of(item.kind, grid or item.grid, item.times if times is None else times, tokens)
        assert caught.value.status == 400
        assert len(caught.value.message) > 10, "say what is wrong with it"
