"""PoolProbe: runs prompts through a network with the engine's own attention, over a scratch pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.model_family import ProbeRun
from pegboard.toolkit.model.state_slots import AlternatingSlots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.model_family import Network


class PoolProbe(ProbeRun):
    """Computes prompts in three ragged batches, as a server would: a first part of each, the rest but one token
    after it, and the last tokens as a decode step. So what a family gets wrong with a cached prefix shows as well.
    Where layers keep states, the second part of the first prompt is cut: it is computed in two rounds.

    `make_pool` builds a pool of that many usable pages; what is in them is set to NaN. Pages are laid out backwards and
    interleaved between requests, so that nothing works by neighbourhood.
    """

    def __init__(
        self,
        network: Network,
        spec: ModelSpec,
        attention: AttentionBackend,
        make_pool: Callable[[int], KVPool],
        page_size: int,
        device: torch.device,
    ) -> None:
        self._network = network
        self._spec = spec
        self._attention = attention
        self._make_pool = make_pool
        self._page_size = page_size
        self._device = device

    def logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Return logits float32 [len, vocab] of every position of each prompt; as many prompts at a time as the backend
        takes.
        """
        if not all(prompts):
            raise ValueError("a probe's prompts must not be empty")
        at_once = self._attention.ctx.max_batch
        found: list[torch.Tensor] = []
        for start in range(0, len(prompts), at_once):
            found += self._together(prompts[start : start + at_once])
        return found

    @torch.inference_mode()
    def _together(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        pool, table = self._memory(lengths)
        slots = AlternatingSlots(self._spec.states, len(lengths), self._device)
        stops = [lengths // 2, lengths - 1, lengths]
        done = np.zeros_like(lengths)
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        for step, stop in enumerate(stops):
            taking = np.flatnonzero(stop > done)
            if taking.size:
                mode = ForwardMode.DECODE if step == len(stops) - 1 else ForwardMode.EXTEND
                batch = self._batch(mode, prompts, taking, done[taking], stop[taking], pool, table)
                if self._spec.states:
                    middle = int(done[0] + stop[0] + 1) // 2
                    cuts = {0: middle} if step == 1 and done[0] < middle < stop[0] else {}
                    batch.states = slots.step(taking, done[taking], stop[taking], cuts)
                self._attention.prepare(batch)
                logits = self._network.logits(self._network.forward(batch))
                split = torch.split(logits, (stop - done)[taking].tolist())
                for index, rows in zip(taking, split, strict=True):
                    parts[index].append(rows)
            done = stop
        return [torch.cat(rows) for rows in parts]

    def _memory(self, lengths: NDArray[np.int64]) -> tuple[KVPool, NDArray[np.int32]]:
        """Return a pool full of NaN, and the row table int32 [batch + 1, width]; row 0 is padding."""
        size = self._page_size
        pages_each = int(-(-lengths.max() // size))
        count = len(lengths)
        pool = self._make_pool(count * pages_each)
        for layer in self._spec.layers:
            pool.keys(layer.layer_id)[size:] = float("nan")
            pool.values(layer.layer_id)[size:] = float("nan")
        table = np.zeros((count + 1, pages_each * size), dtype=np.int32)
        pages = np.arange(count * pages_each, 0, -1).reshape(pages_each, count)
        for row in range(count):
            table[row + 1] = (pages[:, row, None] * size + np.arange(size)).reshape(-1)
        return pool, table

    def _batch(
        self,
        mode: ForwardMode,
        prompts: list[list[int]],
        taking: NDArray[np.int64],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        pool: KVPool,
        table: NDArray[np.int32],
    ) -> ForwardBatch:
        """Return tokens [start, stop) of each prompt of `taking`."""
        spans = list(zip(taking, starts, stops, strict=True))
        tokens = np.concatenate([np.asarray(prompts[i][start:stop], dtype=np.int64) for i, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        slots = np.concatenate([table[i + 1, start:stop] for i, start, stop in spans]).astype(np.int64)
        group = KVGroupView(self._tensor(table), self._tensor(slots))
        lens = stops - starts
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(spans),
            input_ids=self._tensor(tokens),
            positions=self._tensor(positions),
            req_pool_indices=self._tensor(taking + 1),
            seq_lens=self._tensor(stops),
            seq_lens_cpu=stops,
            kv_groups=(group,) * len(self._spec.kv_groups),
            kv_pool=pool,
            attn_backend=self._attention,
        )
        if mode.is_extend:
            batch.extend_lens, batch.extend_lens_cpu = self._tensor(lens), lens
            batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = self._tensor(starts), starts
            batch.extend_start_loc = self._tensor(np.cumsum(lens) - lens)
        return batch

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
