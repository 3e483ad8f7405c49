"""A scheduler around a fake model with layers that read a window, and that checks which pages it is told to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.windows.pages import WindowPages
from pegboard.plugins.windows.stage import Windows
from tests.core.pipeline.group_models import GARBAGE, KeepsWindows
from tests.core.pipeline.harness import Harness


class WindowHarness(Harness):
    """With these `windows`, and so many pages in `count` for each, which the model is built with. Stages in `before`
    stand before that of the windows.
    """

    def __init__(
        self,
        *,
        windows: Sequence[int] = (5,),
        count: int = 24,
        every: int = 8,
        before: Sequence[Stage] = (),
        joining: Sequence[Stage] = (),
        **more: Any,
    ) -> None:
        page_size = more.get("page_size", 1)
        self.stage = Windows(lambda memory: WindowPages(windows, memory, page_size, every))
        model = type("WindowModel", (KeepsWindows,), {"windows": windows, "count": count, "page_size": page_size})
        super().__init__(model=model, joining=[*before, self.stage, *joining], **more)
        assert isinstance(self.model, KeepsWindows)
        self.paged = self.group_model = self.model

    @property
    def kept(self) -> int:
        """Tails."""
        return len(self.stage.pages.tails)

    def step(self) -> Any:
        outputs = super().step()
        pages = self.stage.pages
        assert pages.books_error() is None
        for values, group in zip(self.paged.values, pages.groups, strict=True):
            assert group.spoken_for() <= group.count, "more is promised than there is"
            values.reshape(-1, self.memory.page_size)[np.array(group.free, np.int64)] = GARBAGE
        assert not self.paged.wrong
        return outputs

    def run(self, limit: int = 5000) -> None:
        super().run(limit)
        assert self.stage.idle_error() is None
