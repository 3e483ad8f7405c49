"""States of the model for answers, by prefill passes of the engine's runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView, Taps
from pegboard.tools.train_draft.settings import TOPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.engine.engine import Engine
    from pegboard.tools.train_draft.answers import Answer

PASS_TOKENS = 1024
"""Tokens of one pass, unless a single sequence has more."""
_LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """What the model made of a sequence of L tokens, of which the first `prompt` are its prompt.

    `ids` int64 [L]; `taps` [L, places x hidden] bfloat16 are the model's states at each token. Row r of `tops` int32
    [answer, tops] and `shares` float32 [answer, tops] has the likeliest successors of token prompt - 1 + r, the
    likeliest first, and their probabilities.
    """

    ids: Tensor
    prompt: int
    taps: Tensor
    tops: Tensor
    shares: Tensor

    @property
    def entries(self) -> int:
        """How many entries of the draft head it has: one per token, but for the first and the last one."""
        return max(0, self.ids.shape[0] - 2)


class StateReader:
    """Runs sequences through the runner of an engine at rest. The engine's cache is emptied, and its pool written over.

    `taps` are places, see `Taps`. The runner needs the capabilities `taps` and `ends`.
    """

    def __init__(self, engine: Engine, taps: tuple[int, ...]) -> None:
        engine.flush_cache()
        self._runner, self._pool = engine.built.runner, engine.built.pool
        self._ctx = self._runner.ctx
        self._ends = self._runner.ends()
        self._taps = taps
        self._last = len(self._ctx.spec.layers) + 1

    def embed(self, ids: Tensor) -> Tensor:
        """Return the model's embeddings [n, hidden] bfloat16 of ids int64 [n], on the host."""
        with torch.inference_mode():
            return self._ends.embed(ids.to(self._ctx.device)).to("cpu", torch.bfloat16)

    def read(self, answers: Sequence[Answer]) -> Iterator[SequenceStates]:
        """Yield the states of each answer with its prompt, in order. Raises PegboardError for one that does not fit."""
        for some in self._passes(answers):
            yield from self._pass(some)

    def _passes(self, answers: Sequence[Answer]) -> Iterator[list[Answer]]:
        """Split into passes of about PASS_TOKENS tokens, which fit into the pool."""
        page, room = self._pool.page_size, self._pool.num_slots - self._pool.page_size
        most = self._ctx.attention.ctx.max_batch
        some: list[Answer] = []
        tokens = slots = 0
        for one in answers:
            length = len(one.prompt) + len(one.answer)
            pages = -(-length // page) * page
            if pages > room:
                raise PegboardError(
                    f"memory.max_total_tokens: the KV pool holds {room} tokens, fewer than the {length} of an answer"
                )
            if some and (tokens + length > PASS_TOKENS or slots + pages > room or len(some) == most):
                yield some
                some, tokens, slots = [], 0, 0
            some.append(one)
            tokens, slots = tokens + length, slots + pages
        if some:
            yield some

    @torch.inference_mode()
    def _pass(self, answers: Sequence[Answer]) -> Iterator[SequenceStates]:
        sequences = [one.prompt + one.answer for one in answers]
        batch = self._batch(sequences)
        self._runner.execute(batch, None)
        assert batch.taps is not None
        found = batch.taps.joined()
        width = found.shape[1] // (len(self._taps) + 1)
        taps, final = torch.split(found, [width * len(self._taps), width], dim=1)
        lengths = [len(one) for one in sequences]
        for answer, ids, states, last in zip(
            answers, sequences, torch.split(taps, lengths), torch.split(final, lengths), strict=True
        ):
            tops, shares = self._likeliest(last[len(answer.prompt) - 1 : len(ids) - 1])
            yield SequenceStates(
                torch.tensor(ids), len(answer.prompt), states.to("cpu", torch.bfloat16, copy=True), tops, shares
            )

    def _likeliest(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest successors int32 [n, tops] of states [n, hidden], and their probabilities float32."""
        count = min(TOPS, self._ctx.spec.vocab_size)
        tops, shares = [], []
        for some in torch.split(states, _LOGIT_ROWS):
            logits = self._ends.logits(some)
            values, ids = logits.topk(count)
            tops.append(ids.int().cpu())
            shares.append((values - logits.logsumexp(-1, keepdim=True)).exp().cpu())
        return torch.cat(tops), torch.cat(shares)

    def _batch(self, sequences: Sequence[list[int]]) -> ForwardBatch:
        """Return a prefill of whole sequences, each in pages of its own."""
        page = self._pool.page_size
        lens = np.array([len(one) for one in sequences], dtype=np.int64)
        pages = -(-lens // page) * page
        starts = page + np.cumsum(pages) - pages
        table = np.zeros((len(sequences) + 1, int(pages.max())), dtype=np.int32)
        table[1:] = starts[:, None] + np.arange(table.shape[1])
        positions = np.concatenate([np.arange(length) for length in lens])
        slots = np.concatenate([start + np.arange(length) for start, length in zip(starts, lens, strict=True)])
        none = np.zeros_like(lens)
        group = KVGroupView(self._tensor(table), self._tensor(slots))
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(sequences),
            input_ids=self._tensor(np.concatenate([np.asarray(one, dtype=np.int64) for one in sequences])),
            positions=self._tensor(positions),
            req_pool_indices=self._tensor(np.arange(1, len(sequences) + 1)),
            seq_lens=self._tensor(lens),
            seq_lens_cpu=lens,
            kv_groups=(group,) * len(self._ctx.spec.kv_groups),
            kv_pool=self._pool,
            attn_backend=self._ctx.attention,
            extend_lens=self._tensor(lens),
            extend_lens_cpu=lens,
            extend_prefix_lens=self._tensor(none),
            extend_prefix_lens_cpu=none,
            extend_start_loc=self._tensor(np.cumsum(lens) - lens),
            logits_indices=self._tensor(np.empty(0, dtype=np.int64)),
            taps=Taps((*self._taps, self._last)),
        )

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._ctx.device)
