"""A follower's model: what computes batches in its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.core.engine.build import choose
from pegboard.core.engine.choose import load_model, pages_for, with_memory
from pegboard.core.engine.followers import facts
from pegboard.core.engine.sizing import make_rows
from pegboard.core.engine.stages import StageBuilder
from pegboard.core.registry.hooks import Hooks
from pegboard.core.worker.device_parts import state_memory
from pegboard.core.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges


class FollowingModel:
    """A FollowerModel: built like the scheduler's, as far as it computes, by the config that `composed` returns."""

    def __init__(self, composed: Callable[[], ResolvedConfig], scratch: Path) -> None:
        self._composed = composed
        self._scratch = scratch
        self._worker: Worker | None = None
        self.payloads: dict[str, type] = {}

    def prepare(self, services: Mapping[str, object]) -> Mapping[str, str]:
        resolved = self._composed()
        hooks = Hooks.load(resolved.registry, resolved.plugin_options)
        self._chosen, self._family = choose(resolved, hooks, services)
        self._parts = StageBuilder(self._chosen, hooks, self._scratch)
        self.payloads = {part.name: part.payload for part in self._parts.parts if part.payload is not None}
        return facts(self._chosen)

    @torch.inference_mode()
    def load(self) -> None:
        self._runner = load_model(self._chosen, self._family, self._parts.chunk_size, self._parts.parts)

    @torch.inference_mode()
    def room(self, sharing: int) -> int:
        return pages_for(self._chosen, self._runner, self._parts.chunk_size, self._parts.parts, sharing)

    def start(self, num_pages: int) -> None:
        chosen, parts = self._chosen, self._parts.parts
        with torch.inference_mode():
            loaded = with_memory(chosen, self._family, self._runner, num_pages, parts)
        rows = make_rows(chosen.resolved.engine, chosen.model.device, loaded.memory.max_context_len, mirrored=True)
        pool, queue = loaded.memory.pool, chosen.queue
        self._worker = Worker(self._runner, chosen.attention, pool, rows, queue, parts=parts)
        self._runner.start(pool, *self._worker.batches.tables, states=state_memory(parts))

    @property
    def _started(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("a batch comes before the follower has memory")
        return self._worker

    def run(self, work: ModelWorkerBatch) -> None:
        self._started.run(work)

    @torch.inference_mode()
    def send_table(self, table: TableChanges) -> None:
        self._started.batches.send_table(table)
