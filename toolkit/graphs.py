"""For runners: graphs of decode steps and prefills, whose batches have fixed sizes and lie in fixed places."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from pegboard.core.interfaces.forward import BatchStates, ForwardBatch, ForwardMode, KVGroupView
from pegboard.toolkit.model.states import decode_states

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import Attention
    from pegboard.core.interfaces.graphs import GraphCapture, Replay
    from pegboard.core.interfaces.kv_pool import KVPool

T = TypeVar("T")

ExtraShapes = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Names of extras in order, each with its type and the shape of one request's part."""

_STEPS = ((8, 64), (16, 256), (32, 2**31))
"""From 8 on sizes are multiples of the first number up to the second one. So at most 15 rows are padding up to
256 requests, and 31 beyond."""


def default_sizes(most: int) -> tuple[int, ...]:
    """Return sizes of decode batches up to `most`, ascending: 1, 2, 4, 8 to 64 by 8, to 256 by 16, then by 32."""
    sizes = [1, 2, 4]
    for step, stop in _STEPS:
        sizes += range((sizes[-1] // step + 1) * step, min(stop, most) + 1, step)
    return tuple(sorted({min(size, most) for size in [*sizes, most]})) if most > 0 else ()


def padded(count: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of ascending sizes that has room for `count` requests, None where none has."""
    place = bisect.bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def extra_shapes(batch: ForwardBatch) -> ExtraShapes | None:
    """Return what a batch's extras look like; None if some of them cannot be part of a graph: whatever is not a tensor
    with one part per request.
    """
    found = []
    for name, value in sorted(batch.extras.items()):
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != batch.batch_size:
            return None
        found.append((name, value.dtype, tuple(value.shape[1:])))
    return tuple(found)


def states_fit(states: BatchStates | None, memory: Mapping[str, torch.Tensor] | None) -> bool:
    """Return whether the states of a decode batch can be those of a graph over `memory`: all rows are computed at once
    and in order, and each goes on from a state. Both are None if the model keeps no states.
    """
    if states is None or memory is None:
        return states is None and memory is None
    if states.memory is not memory or len(states.rounds) != 1:
        return False
    (only,) = states.rounds
    return only.fresh is None and bool((only.firsts == np.arange(len(only.firsts))).all())


class StaticBatch:
    """A decode batch of a fixed size in a fixed place. Padding has row 0, slot 0, position 0 and a length of 1, and
    zeros in extras; all of it is written again each time, since a larger batch may have stood there before.

    `row_tables` has the row table of each KV group, `states` the memory of a model whose layers keep states. There,
    padding reads and writes slot 0, which begins with zeros: so it has finite numbers at first.
    """

    def __init__(
        self,
        size: int,
        row_tables: Sequence[torch.Tensor],
        pool: KVPool,
        attention: Attention,
        extras: ExtraShapes = (),
        states: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        device = row_tables[0].device

        def zeros() -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self._ones = torch.ones(size, dtype=torch.int64, device=device)
        self._zeros = zeros()
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=zeros(),
            positions=zeros(),
            req_pool_indices=zeros(),
            seq_lens=self._ones.clone(),
            seq_lens_cpu=np.ones(size, np.int64),
            kv_groups=tuple(KVGroupView(table, zeros()) for table in row_tables),
            kv_pool=pool,
            attn_backend=attention,
            states=None if states is None else decode_states(states, zeros(), zeros()),
            real_size=0,
            fixed=True,
        )
        for state in (states or {}).values():
            state[0].zero_()  # what padding reads
        self._extras = [torch.zeros((size, *shape), dtype=dtype, device=device) for _, dtype, shape in extras]
        self._extra_zeros = [torch.zeros_like(one) for one in self._extras]
        self.batch.extras = {name: one for (name, _, _), one in zip(extras, self._extras, strict=True)}

    @property
    def size(self) -> int:
        return self.batch.batch_size

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the fixed batch with the numbers of another decode batch, no larger and with such extras."""
        fixed, count = self.batch, batch.batch_size
        statics, sources = self._tensors(fixed), self._tensors(batch)
        targets = [one[:count] for one in statics]
        if count < self.size:
            plain = len(statics) - 1 - len(self._extras)
            padding = [*[self._zeros] * plain, self._ones, *self._extra_zeros]
            targets += [one[count:] for one in statics]
            sources += [one[count:] for one in padding]
        torch._foreach_copy_(targets, sources)
        fixed.seq_lens_cpu[:count] = batch.seq_lens_cpu
        fixed.seq_lens_cpu[count:] = 1
        fixed.real_size = count
        return fixed

    def _tensors(self, batch: ForwardBatch) -> list[torch.Tensor]:
        slots = [group.out_cache_loc for group in batch.kv_groups]
        if batch.states is not None:
            slots += [batch.states.rounds[0].sources, batch.states.rounds[0].targets]
        extras: list[torch.Tensor] = [batch.extras[name] for name in self.batch.extras]
        return [batch.input_ids, batch.positions, batch.req_pool_indices, *slots, batch.seq_lens, *extras]


_PREFILL_STEPS = ((16, 32), (32, 128), (64, 512), (128, 1024), (256, 2048))
"""As `_STEPS`: from 65 tokens on a third of a batch is padding at most, from 193 on a quarter."""


def prefill_sizes(most: int = 2048) -> tuple[int, ...]:
    """Return tokens of extend batches up to `most`, ascending: 16, 32 to 128 by 32, to 512 by 64, to 1024 by 128, to
    2048 by 256.
    """
    sizes = [0]
    for step, stop in _PREFILL_STEPS:
        sizes += range((sizes[-1] // step + 1) * step, stop + 1, step)
    return tuple(size for size in sizes[1:] if size <= most)


class StaticExtend:
    """An extend batch of a fixed number of `tokens` in a fixed place, with room for `prefills` requests of several new
    tokens and `decodes` of one; see `ForwardBatch.fixed`. Padding is written again each time.

    `row_tables` has the row table of each KV group.
    """

    def __init__(
        self,
        tokens: int,
        prefills: int,
        decodes: int,
        row_tables: Sequence[torch.Tensor],
        pool: KVPool,
        attention: Attention,
    ) -> None:
        device, size = row_tables[0].device, prefills + decodes + 1

        def zeros(count: int = size) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self.prefills, self.decodes = prefills, decodes
        self._zeros = zeros(max(tokens, size))
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.MIXED if decodes else ForwardMode.EXTEND,
            batch_size=size,
            input_ids=zeros(tokens),
            positions=zeros(tokens),
            req_pool_indices=zeros(),
            seq_lens=zeros(),
            seq_lens_cpu=np.zeros(size, np.int64),
            kv_groups=tuple(KVGroupView(table, zeros(tokens)) for table in row_tables),
            kv_pool=pool,
            attn_backend=attention,
            extend_lens=zeros(),
            extend_prefix_lens=zeros(),
            extend_start_loc=zeros(),
            extend_lens_cpu=np.zeros(size, np.int64),
            extend_prefix_lens_cpu=np.zeros(size, np.int64),
            real_size=0,
            fixed=True,
            prefills=prefills,
        )

    def has_room(self, batch: ForwardBatch) -> bool:
        """Return whether all requests and tokens of an extend batch fit."""
        assert batch.extend_lens_cpu is not None
        singles = int((batch.extend_lens_cpu == 1).sum())
        several = batch.batch_size - singles
        return batch.num_tokens <= self.batch.num_tokens and singles <= self.decodes and several <= self.prefills

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the fixed batch with the numbers of another extend batch that it has room for."""
        targets, sources = [], []
        for static, real in zip(_extend_tensors(self.batch), _extend_tensors(batch), strict=True):
            count, rest = len(real), len(static) - len(real)
            targets += [static[:count], static[count:]] if rest else [static]
            sources += [real, self._zeros[:rest]] if rest else [real]
        torch._foreach_copy_(targets, sources)
        fixed, count = self.batch, batch.batch_size
        for mine, other in zip(_host_lengths(fixed), _host_lengths(batch), strict=True):
            mine[:count], mine[count:] = other, 0
        fixed.real_size = count
        return fixed


def _extend_tensors(batch: ForwardBatch) -> list[torch.Tensor]:
    """Return an extend batch's numbers, by token and by request, on the device."""
    lengths = batch.extend_lens, batch.extend_prefix_lens, batch.extend_start_loc
    slots = [group.out_cache_loc for group in batch.kv_groups]
    by_token = [batch.input_ids, batch.positions, *slots]
    return [*by_token, batch.req_pool_indices, batch.seq_lens, *(one for one in lengths if one is not None)]


def _host_lengths(batch: ForwardBatch) -> list[NDArray[np.int64]]:
    found = batch.seq_lens_cpu, batch.extend_lens_cpu, batch.extend_prefix_lens_cpu
    return [one for one in found if one is not None]


class CudaCapture:
    """CUDA's graphs of one device, all in one memory pool: what one needs the others use, too, since no two run at the
    same time. They are recorded on a stream of their own; other threads may go on using the device meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._bytes = 0

    def warm(self, run: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = run()
        current.wait_stream(self._stream)
        return found

    def capture(self, run: Callable[[], T]) -> tuple[Replay, T]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        how = "thread_local"  # the default minds what any other thread does
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=how):
            found = run()
        self._bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay, found

    def memory(self) -> int:
        return self._bytes


_recorders: Mapping[str, Callable[[torch.device], GraphCapture]] = {"cuda": CudaCapture}


def capture_of(device: torch.device) -> GraphCapture | None:
    """Return what records graphs on a device, None where nothing does."""
    make = _recorders.get(device.type)
    return None if make is None else make(device)


@contextmanager
def recorded(device_type: str, make: Callable[[torch.device], GraphCapture]) -> Iterator[None]:
    """Have engines that are built in this block record graphs on a type of device with what `make` returns: for tests,
    where a CPU has none of its own.
    """
    global _recorders
    before = _recorders
    _recorders = {**before, device_type: make}
    try:
        yield
    finally:
        _recorders = before
