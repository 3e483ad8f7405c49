"""A scheduler around a fake model with layers that read a window: what it keeps of a token depends on what is kept of
those in the window before it, in pages of their own, and the next token on that. So a wrong page, or one that has been
given back too early, changes the answer. `oracle` computes the same from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.stage import Stage
from pegboard.core.pipeline.executor import Done
from pegboard.plugins.windows.messages import NAME, GroupWork, Memory, WindowWork
from pegboard.plugins.windows.pages import WindowPages
from pegboard.plugins.windows.stage import Windows
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from tests.core.pipeline.harness import EMPTY, EOS, VOCAB, FakeModel, Harness, next_token

PRIME = 1_000_003


def kept(token: int, before: Sequence[int]) -> int:
    """What is kept of a token, by what is kept of those that it sees `before` itself."""
    return (token + 1 + sum(value * (31 + place) for place, value in enumerate(before))) % PRIME


def oracle(windows: Sequence[int], prompt: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
    """What a request alone in the world would get."""
    tokens, values = list[int](), [list[int]() for _ in windows]

    def take(token: int) -> None:
        tokens.append(token)
        for window, own in zip(windows, values, strict=True):
            own.append(kept(token, own[max(0, len(own) - window + 1) :]))

    for token in prompt:
        take(token)
    while len(tokens) < len(prompt) + n:
        take(draw(np.array(tokens, np.int64), [own[-1] for own in values]))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def draw(context: NDArray[np.int64], lasts: Sequence[int]) -> int:
    """The token after a context, whose last token's values are `lasts`."""
    return (next_token(context) + sum(lasts)) % VOCAB


class WindowModel(FakeModel):
    """Has a value per slot of each group, and those of group 0 as the other one has them."""

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        super().__init__(rows, num_slots)
        self.windows, pages, size = WindowHarness.windows, WindowHarness.count, WindowHarness.page_size
        self.values = [np.full((pages + 1) * size, EMPTY, np.int64) for _ in self.windows]
        self.tables = [np.zeros(rows.host.shape, np.int32) for _ in self.windows]
        memory = Memory((pages,) * len(self.windows), *rows.host.shape)
        self.stage_parts = {NAME: lambda work: Done(memory)}
        self.late: Any = lambda work: False
        """Whether a pass that has run fails all the same."""
        self.lost: Any = lambda work: False
        """Whether a pass fails before its changes of tables have arrived."""

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        if self.lost(work):
            if work.table is not None:
                self.send_table(work.table)
            raise RuntimeError("out of luck, early")
        payload = work.payloads[NAME]
        assert isinstance(payload, WindowWork)
        for table, group in zip(self.tables, payload.groups, strict=True):
            table.reshape(-1)[group.places] = group.slots
        return super().__call__(work)

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        ids = work.input_ids.copy()
        if work.future_indices is not None:
            ids[work.future_indices] = self.last[work.rows[work.future_indices + len(work.rows) - len(ids)]]
        self.slots[work.out_cache_loc] = ids
        payload = work.payloads[NAME]
        assert isinstance(payload, WindowWork)
        for number, group in enumerate(payload.groups):
            self._compute(number, group, work, ids)
        sampled, ends = self._sampled(work), np.cumsum(work.extend_lens) - 1
        tokens = []
        for row, length, end in zip(work.rows.tolist(), work.seq_lens.tolist(), ends.tolist(), strict=True):
            if end in sampled:
                lasts = [int(own[table[row, length - 1]]) for own, table in zip(self.values, self.tables, strict=True)]
                tokens.append(draw(self.slots[self.table[row, :length]], lasts))
        found = np.array(tokens, np.int64)
        self.last[work.sampled_rows] = found
        if self.late(work):
            raise RuntimeError("out of luck, late")
        return BatchResult(found)

    def _sampled(self, work: ModelWorkerBatch) -> set[int]:
        """The packed tokens behind which one is drawn."""
        return set(range(len(work.input_ids)) if work.logits_indices is None else work.logits_indices.tolist())

    def _compute(self, number: int, group: GroupWork, work: ModelWorkerBatch, ids: NDArray[np.int64]) -> None:
        values, table, window, at = self.values[number], self.tables[number], self.windows[number], 0
        assert 0 not in group.out_cache_loc, "page 0 is padding"
        assert len(set(group.out_cache_loc.tolist())) == len(group.out_cache_loc), "two tokens in one slot"
        for row, start, stop in zip(work.rows.tolist(), work.prefix_lens.tolist(), work.seq_lens.tolist(), strict=True):
            for position in range(start, stop):
                slot = int(group.out_cache_loc[at])
                assert table[row, position] == slot, "the table has another slot"
                before = values[table[row, max(0, position - window + 1) : position]].tolist()
                values[slot] = kept(int(ids[at]), before)
                at += 1

    def spoil(self, work: ModelWorkerBatch) -> None:
        """What a pass that failed leaves behind is undefined."""
        payload = work.payloads[NAME]
        assert isinstance(payload, WindowWork)
        for values, group in zip(self.values, payload.groups, strict=True):
            values[group.out_cache_loc] = EMPTY


class WindowHarness(Harness):
    """With these `windows`, and so many pages in `count` for each, which the model is built with."""

    windows: Sequence[int] = (5,)
    count = 24
    page_size = 1

    def __init__(
        self,
        *,
        windows: Sequence[int] = (5,),
        count: int = 24,
        every: int = 8,
        joining: Sequence[Stage] = (),
        **more: Any,
    ) -> None:
        WindowHarness.windows, WindowHarness.count = windows, count
        page_size = WindowHarness.page_size = more.get("page_size", 1)
        self.stage = Windows(lambda memory: WindowPages(windows, memory, page_size, every))
        super().__init__(model=WindowModel, joining=[self.stage, *joining], **more)
        assert isinstance(self.model, WindowModel)
        self.paged = self.model

    def step(self) -> Any:
        outputs = super().step()
        pages = self.stage.pages
        assert pages.books_error() is None
        for values, group in zip(self.paged.values, pages.groups, strict=True):
            assert group.spoken_for() <= group.count, "more is promised than there is"
            free = np.array(group.free, np.int64)
            values.reshape(-1, self.memory.page_size)[free] = EMPTY
        return outputs

    def run(self, limit: int = 5000) -> None:
        super().run(limit)
        assert self.stage.idle_error() is None
