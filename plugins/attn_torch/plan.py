"""What the layers of one batch share: which tokens attend together, and which slots they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import ForwardBatch

Rows = slice | torch.Tensor
"""Rows of a tensor's first dimension: a slice where they follow each other (a view), else int64 indices (a copy)."""

_WASTE = 0.75
"""Decoding requests share a call when the shortest is at least this part of the longest..."""
_SLACK = 64
"""...or at most this many tokens shorter: a call costs about as much as reading that many tokens."""
MOST_TOKENS = 8192
"""Tokens of KV, padding included, that a call gathers; a longer request has a call of its own."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of one new token each and of similar length, computed in one padded call.

    `tokens` are their packed tokens. `slots` name size x length rows of the KV buffers. A request that is shorter than
    `length` repeats its own last slot, which is sure to hold a number, and `mask` [size, 1, 1, length] puts -inf there
    (None: nothing to hide).
    """

    tokens: Rows
    slots: Rows
    size: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendSpan:
    """One request of several new tokens: packed tokens [start, start + new), after `prefix` tokens of KV.

    `slots` name the KV of positions [first, prefix + new), where `first` is the first that a new token sees. Of a layer
    that attends in chunks a span lies in one chunk, and positions count from the chunk's first.
    """

    start: int
    new: int
    prefix: int
    first: int
    slots: Rows


@dataclass(frozen=True, slots=True)
class TreeSpan:
    """One request with a tail: packed tokens [start, start + new). `mask` [new, keys] puts -inf where one does not see
    one of the keys at `slots`.
    """

    start: int
    new: int
    slots: Rows
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a batch, for the layers of one KV group that have the same window, or chunks of the same size."""

    decodes: tuple[DecodeGroup, ...]
    extends: tuple[ExtendSpan, ...]
    trees: tuple[TreeSpan, ...] = ()

    @property
    def calls(self) -> int:
        return len(self.decodes) + len(self.extends) + len(self.trees)


def make_plan(
    batch: ForwardBatch, kv_group: int, window: int | None, dtype: torch.dtype, *, chunked: bool = False
) -> Plan:
    """Plan for one KV group and window (None: everything is seen), or chunks of that size. `dtype` is that of the
    masks.
    """
    lens = batch.seq_lens_cpu
    new = batch.extend_lens_cpu
    if new is None:
        new = np.ones(batch.batch_size, dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(new)[:-1])) if len(new) else new
    table = batch.kv_groups[kv_group].row_table.index_select(0, batch.req_pool_indices)
    trees: tuple[TreeSpan, ...] = ()
    causal = new
    if batch.tail_lens_cpu is not None and batch.tail_lens_cpu.any():
        causal = np.where(batch.tail_lens_cpu > 0, 0, new)
        trees = tuple(
            _tree_span(batch, table, int(row), int(new[row]), int(starts[row]), window, dtype, chunked=chunked)
            for row in np.flatnonzero(causal != new)
        )
    single = np.flatnonzero(causal == 1)
    seen = lens if window is None else (lens - 1) % window + 1 if chunked else np.minimum(lens, window)
    decodes = tuple(
        _decode_group(table, rows, lens, seen, starts, dtype) for rows in _similar(single, seen) if len(rows) > 0
    )
    spans: list[ExtendSpan] = []
    for row in np.flatnonzero(causal > 1).tolist():
        end, count, start = int(lens[row]), int(new[row]), int(starts[row])
        if window is not None and chunked:
            spans += _chunk_spans(table[row], end, count, start, window)
        else:
            spans.append(_extend_span(table, row, end, count, start, window))
    return Plan(decodes, tuple(spans), trees)


def _similar(rows: NDArray[np.int64], seen: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut `rows` into groups whose lengths differ little; within a group in the batch's order."""
    if len(rows) == 0:
        return []
    order = rows[np.argsort(-seen[rows], kind="stable")]
    lengths = seen[order].tolist()
    cuts, first, longest = [], 0, lengths[0]
    for at, length in enumerate(lengths):
        differs = length < longest * _WASTE and length < longest - _SLACK
        if differs or (at - first + 1) * longest > MOST_TOKENS > length:
            cuts.append(at)
            first, longest = at, length
    return [np.sort(group) for group in np.split(order, cuts)]


def _decode_group(
    table: torch.Tensor,
    rows: NDArray[np.int64],
    lens: NDArray[np.int64],
    seen: NDArray[np.int64],
    starts: NDArray[np.int64],
    dtype: torch.dtype,
) -> DecodeGroup:
    device = table.device
    counts = seen[rows]
    size, length = len(rows), int(counts.max())
    tokens = _rows(starts[rows], device)
    if size == 1:
        row, end = int(rows[0]), int(lens[rows[0]])
        return DecodeGroup(tokens, _consecutive(table[row, end - length : end]), 1, length, None)
    # Host arithmetic and one copy: cheaper than as many small kernels, and the lengths are on the host anyway.
    steps = np.arange(length)
    positions = np.minimum((lens[rows] - counts)[:, None] + steps, (lens[rows] - 1)[:, None])
    flat = torch.from_numpy(positions + rows[:, None] * table.shape[1]).to(device)
    slots = table.view(-1).index_select(0, flat.view(-1)).long()
    mask = None
    if int(counts.min()) < length:
        hidden = torch.from_numpy(steps >= counts[:, None]).to(device)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[:, None, None]
    return DecodeGroup(tokens, slots, size, length, mask)


def _extend_span(table: torch.Tensor, row: int, end: int, new: int, start: int, window: int | None) -> ExtendSpan:
    prefix = end - new
    first = 0 if window is None else max(0, prefix - window + 1)
    return ExtendSpan(start, new, prefix, first, _consecutive(table[row, first:end]))


def _chunk_spans(row: torch.Tensor, end: int, new: int, start: int, chunk: int) -> list[ExtendSpan]:
    """Return the spans of a request's last `new` tokens, one for each chunk that has some of them."""
    spans, first = [], end - new
    while first < end:
        begin = first // chunk * chunk
        stop = min(begin + chunk, end)
        spans.append(ExtendSpan(start, stop - first, first - begin, 0, _consecutive(row[begin:stop])))
        start, first = start + stop - first, stop
    return spans


def _tree_span(
    batch: ForwardBatch,
    table: torch.Tensor,
    row: int,
    new: int,
    start: int,
    window: int | None,
    dtype: torch.dtype,
    *,
    chunked: bool,
) -> TreeSpan:
    assert batch.tail_bits is not None
    assert batch.tail_lens_cpu is not None
    end, tail = int(batch.seq_lens_cpu[row]), int(batch.tail_lens_cpu[row])
    # The bits are on the device, so how deep a token is remains unknown here: its window reaches back this far at most.
    root = end - tail
    first = 0 if window is None else root // window * window if chunked else max(0, root - window + 1)
    hidden = _tree_hidden(batch.tail_bits[start : start + new], end - first, tail, window, chunked=chunked)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device).masked_fill_(hidden, float("-inf"))
    return TreeSpan(start, new, _consecutive(table[row, first:end]), mask)


def _tree_hidden(bits: torch.Tensor, keys: int, tail: int, window: int | None, *, chunked: bool) -> torch.Tensor:
    """Return bool [new, keys]: which of the last `keys` of a request tokens with these `bits` [new] do not see. The
    first of these keys begins a chunk.
    """
    seen = (bits[:, None] >> torch.arange(tail, device=bits.device) & 1).bool()
    hidden = torch.zeros((len(bits), keys), dtype=torch.bool, device=bits.device)
    hidden[:, keys - tail :] = ~seen
    if window is not None:
        # What a token sees of the tail stands one after the other, and the token itself at the end.
        places = keys - tail - 1 + seen.cumsum(1)
        own = places[:, -1:]
        first = own // window * window if chunked else own - window + 1
        hidden[:, : keys - tail] = torch.arange(keys - tail, device=bits.device) < first
        hidden[:, keys - tail :] |= places < first
    return hidden


def _rows(indices: NDArray[np.int64], device: torch.device) -> Rows:
    first, count = int(indices[0]), len(indices)
    if int(indices[-1]) - first == count - 1:  # ascending by construction
        return slice(first, first + count)
    return torch.from_numpy(indices).to(device)


def _consecutive(slots: torch.Tensor) -> Rows:
    """`slots` as a slice where they follow each other, so that K and V are read in place; looked at on a CPU only.

    On another device the look would be a synchronisation.
    """
    if slots.device.type == "cpu":
        host = slots.numpy()
        first, count = int(host[0]), len(host)
        if int(host[-1]) - first == count - 1 and bool((np.diff(host) == 1).all()):
            return slice(first, first + count)
    return slots.long()
