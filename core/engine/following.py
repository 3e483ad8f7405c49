"""A follower's model: what computes batches in its process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pegboard.core.engine.build import choose
from pegboard.core.engine.choose import load_model, with_memory
from pegboard.core.engine.sizing import make_rows
from pegboard.core.engine.stages import StageBuilder
from pegboard.core.registry.hooks import Hooks
from pegboard.core.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.engine.choose import Chosen
    from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges


class FollowingModel:
    """A FollowerModel: built like the scheduler's, as far as it computes."""

    def __init__(self, resolved: ResolvedConfig, scratch: Path) -> None:
        self._resolved = resolved
        self._scratch = scratch
        self._worker: Worker | None = None
        self.payloads: dict[str, type] = {}

    def load(self, services: Mapping[str, object]) -> None:
        hooks = Hooks.load(self._resolved.registry, self._resolved.plugin_options)
        self._chosen, self._family = choose(self._resolved, hooks, services)
        self._parts = StageBuilder(self._chosen, hooks, self._scratch)
        self.payloads = {part.name: part.payload for part in self._parts.parts if part.payload is not None}
        with torch.inference_mode():
            self._runner = load_model(self._chosen, self._family, self._parts.chunk_size, self._parts.parts)

    def start(self, num_pages: int) -> None:
        config, parts = self._resolved.engine, self._parts
        memory = config.memory.model_copy(update={"max_total_tokens": num_pages * config.memory.page_size})
        engine = config.model_copy(update={"memory": memory})
        chosen: Chosen = replace(self._chosen, resolved=replace(self._resolved, engine=engine))
        with torch.inference_mode():
            loaded = with_memory(chosen, self._family, self._runner, parts.chunk_size, parts.parts)
        rows = make_rows(config, chosen.model.device, loaded.memory.max_context_len, mirrored=True)
        pool, queue = loaded.memory.pool, chosen.queue
        self._worker = Worker(self._runner, chosen.attention, pool, rows, queue, parts=parts.parts)
        self._runner.start(pool, self._worker.batches.table)

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
