"""Passes of the suite's model that a speculator is shown, over memory in which everything has an owner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.conformance.rig.paged import PlainAttention, PlainPool
from pegboard.conformance.rig.tails import as_int64, tree_bits
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DeviceSpeculator, DraftBatch, Stands
from pegboard.plugins.speculation.suite.checks import VOCAB, Int64s
from pegboard.plugins.speculation.suite.model import SPEC, ToyModel
from pegboard.toolkit.sampling import tree

PADDING = 0
"""The slot that is written where nothing is to be kept."""
_AHEAD = 128
"""Positions of a row behind the longest text: for drafts that are verified, and for what drafting writes."""


@dataclass(eq=False, slots=True)
class Request:
    """A request: what it says, `text` int64; its row, 0 where it has none; how many tokens are computed there, and
    whether no pass has seen it there; and for how many positions something is kept, the newest token's included.
    """

    text: Int64s
    row: int = 0
    computed: int = 0
    fresh: bool = True
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A request's share in a pass, which computes its tokens up to `stop`. With `sampled` the token there is the
    newest, and has a slot already if there is `room`. With `tree` all tokens but the first were drafted, and stand
    among drafts that do not, so that there is room.
    """

    request: Request
    stop: int
    sampled: bool = True
    room: bool = True
    tree: bool = False

    @property
    def known(self) -> int:
        """For how many positions there is something to keep."""
        return self.stop + (self.sampled and self.room)


@dataclass(frozen=True, slots=True)
class _Share:
    """A part, worked out: the tokens `ids` [n] that it brings, their `positions`, their states, and which of them stay.
    `parents` are those of its tree.
    """

    start: int
    ids: Int64s
    positions: Int64s
    taps: NDArray[np.float32]
    stays: Int64s
    parents: tuple[int, ...] = ()

    def bits(self) -> Int64s:
        """Return int64 [n]: which nodes of its tree each one sees; what it is does not matter without a tree."""
        return as_int64(tree_bits(self.parents)) if self.parents else np.full(len(self.ids), -1, np.int64)


class Bench:
    """A loaded speculator, and passes that it is shown. Requests get rows 1 to `rows`; a row has a slot for each of
    `length` positions and more, in shuffled order.

    With `poison` every slot of the speculator's own layers that it has no business with holds that number, before each
    call. With `strict` each call fails that writes where it must not. With `clobber` the memory of all that it is given
    is something else's after the call.
    """

    def __init__(
        self,
        speculator: DeviceSpeculator[Options],
        *,
        rows: int,
        length: int,
        branches: bool,
        poison: float | None = None,
        strict: bool = False,
        clobber: bool = False,
    ) -> None:
        self.speculator, self.branches = speculator, branches
        self.poison, self.strict, self.clobber = poison, strict, clobber
        self.model = ToyModel()
        self.seated: dict[int, Request] = {}
        self._rows, self._width = rows, length + _AHEAD
        count = rows * self._width
        layers, cpu = (*SPEC.layers, *speculator.layers), torch.device("cpu")
        self.pool = PlainPool(None, KVPoolContext(count + 1, 1, layers, torch.float32, cpu, self.own))
        for buffer in self.own_buffers():
            buffer.zero_()
        self.attention = PlainAttention(None, AttentionContext(layers, 1, torch.float32, cpu, rows, self._width))
        # The last slot belongs to none of the rows: what the table says where a row has nothing leads there.
        self._slots = (np.random.default_rng(3).permutation(count) + 1).reshape(rows, self._width).astype(np.int32)
        self._slots = np.concatenate([np.zeros((1, self._width), np.int32), self._slots])
        self._own_slots = self._slots.copy()
        self._nowhere = count + 1
        self.table = np.full((rows + 1, self._width), self._nowhere, np.int32)
        with torch.inference_mode():
            speculator.load(self.model.ends(), self.attention)

    @property
    def own(self) -> frozenset[int]:
        """The ids of the speculator's own layers."""
        return frozenset(layer.layer_id for layer in self.speculator.layers)

    # ---- requests -------------------------------------------------------------------------------------------------

    def admit(self, text: Sequence[int] | Int64s, prefix: tuple[Request, int] | None = None) -> Request:
        """Give a new request the lowest free row, or that of the one that was seated first. `prefix` is another
        request, and how many of its first tokens are this one's, too: their slots are shared.
        """
        request = Request(np.array(text, np.int64))
        self.seat(request)
        if prefix is not None:
            other, count = prefix
            request.computed = request.kept = count
            self._slots[request.row, :count] = self.table[other.row, :count]
        return request

    def seat(self, request: Request, keep: Sequence[Request] = ()) -> None:
        """Give a request a row in which nothing is computed; never one of those to `keep`."""
        free = [row for row in range(1, self._rows + 1) if row not in self.seated]
        if not free:
            first = next(one for one in self.seated.values() if all(one is not other for other in keep))
            free = [first.row]
            self.leave(first)
        request.row, request.computed, request.fresh, request.kept = free[0], 0, True, 0
        self.seated[request.row] = request
        self.table[request.row] = self._nowhere
        self._slots[request.row] = self._own_slots[request.row]

    def leave(self, request: Request) -> None:
        """Take a request's row back."""
        del self.seated[request.row]
        request.row = 0

    def _allocate(self, request: Request, count: int) -> None:
        """Let its row have slots for so many positions, and not for more."""
        self.table[request.row, :count] = self._slots[request.row, :count]
        self.table[request.row, count:] = self._nowhere

    # ---- passes ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, parts: Sequence[Part], shown: int = 1) -> None:
        """Compute a pass, and show it so often."""
        shares = [self._tree(part) if part.tree else self._tokens(part) for part in parts]
        for part, share in zip(parts, shares, strict=True):
            self._allocate(part.request, max(share.start + len(share.ids), part.known))
        batch = self._batch(parts, shares)
        self._move(parts, shares)
        for _ in range(shown):
            self._observe(batch, parts, shares)
        for part in parts:
            part.request.computed, part.request.kept, part.request.fresh = part.stop, part.known, False

    def _tokens(self, part: Part) -> _Share:
        request, stop = part.request, part.stop
        again = self.speculator.lookback if request.fresh and request.computed else 0
        start = request.computed - again
        taps = self.model.taps(request.text[:stop], self.speculator.taps, start)
        ids = request.text[start:stop]
        return _Share(start, ids, np.arange(start, stop), taps, np.arange(len(ids)))

    def _tree(self, part: Part) -> _Share:
        """Put the tokens that stand among drafts that do not: one beside each, one below that, and one at the end."""
        start, right = part.request.computed, part.request.text[part.request.computed : part.stop].tolist()
        tokens, parents, way = [right[0]], [-1], [0]
        for token in right[1:]:
            above = way[-1]
            if self.branches:
                wrong = len(tokens)
                tokens += [(token + 1) % VOCAB, (token + 5) % VOCAB]
                parents += [above, wrong]
            way.append(len(tokens))
            tokens.append(token)
            parents.append(above)
        for _ in range(2):
            parents.append(len(tokens) - 1)
            tokens.append((tokens[-1] + 7) % VOCAB)
        drafts = TokenTrees(np.array([len(tokens)]), np.array(tokens, np.int64), np.array(parents, np.int64))
        before, packed = part.request.text[:start], drafts.tokens
        paths = [np.concatenate([before, packed[tree.path(drafts, node)]]) for node in range(len(tokens))]
        taps = np.concatenate([self.model.taps(one, self.speculator.taps, len(one) - 1) for one in paths])
        return _Share(start, packed, start + tree.depths(drafts), taps, np.array(way), tuple(parents))

    def _batch(self, parts: Sequence[Part], shares: Sequence[_Share]) -> ForwardBatch:
        rows = np.array([part.request.row for part in parts])
        starts = np.array([share.start for share in shares])
        lens = np.array([len(share.ids) for share in shares])
        ends, firsts = starts + lens, tree.starts(lens)
        at = np.repeat(starts, lens) + tree.places(lens)
        slots = self.table[np.repeat(rows, lens), at].astype(np.int64)
        slots[firsts[starts < [part.request.computed for part in parts]]] = PADDING  # what is looked back at
        mode = _mode(parts, shares)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(parts),
            input_ids=_tensor(np.concatenate([share.ids for share in shares])),
            positions=_tensor(np.concatenate([share.positions for share in shares])),
            req_pool_indices=_tensor(rows),
            seq_lens=_tensor(ends),
            seq_lens_cpu=ends.copy(),
            kv_groups=(KVGroupView(torch.from_numpy(self.table), _tensor(slots)),),
            kv_pool=self.pool,
            attn_backend=self.attention,
        )
        if mode.is_decode:
            return batch
        batch.extend_lens, batch.extend_lens_cpu = _tensor(lens), lens.copy()
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = _tensor(starts), starts.copy()
        batch.extend_start_loc = _tensor(firsts)
        trees = np.array([bool(share.parents) for share in shares])
        sampled = np.repeat([part.sampled for part in parts], lens)
        batch.logits_indices = _tensor(
            np.flatnonzero(sampled & (np.repeat(trees, lens) | (at == np.repeat(ends, lens) - 1)))
        )
        if trees.any():
            batch.tail_lens_cpu = np.where(trees, lens, 0)
            batch.tail_lens = _tensor(batch.tail_lens_cpu)
            batch.tail_bits = _tensor(np.concatenate([share.bits() for share in shares]))
        return batch

    def _move(self, parts: Sequence[Part], shares: Sequence[_Share]) -> None:
        """Move the KV of drafts that stand to where it belongs, as the worker does."""
        for part, share in zip(parts, shares, strict=True):
            if share.parents:
                slots = _tensor(self.table[part.request.row, share.start :].astype(np.int64))
                self.pool.move(slots[_tensor(share.stays)], slots[: len(share.stays)])

    def _observe(self, batch: ForwardBatch, parts: Sequence[Part], shares: Sequence[_Share]) -> None:
        lens = np.array([len(share.ids) for share in shares])
        firsts = tree.starts(lens)
        sampled = np.array([index for index, part in enumerate(parts) if part.sampled], np.int64)
        stands = Stands(
            rows=np.array([part.request.row for part in parts], np.int64),
            starts=np.array([share.start for share in shares]),
            counts=np.array([len(share.stays) for share in shares]),
            tokens=_tensor(np.concatenate([first + share.stays for first, share in zip(firsts, shares, strict=True)])),
            fresh=np.array([part.request.fresh for part in parts]),
            sampled=sampled,
            newest=_tensor(np.array([part.request.text[part.stop] for part in parts if part.sampled], np.int64)),
            room=np.array([part.room for part in parts if part.sampled], np.bool_),
        )
        taps = _tensor(np.concatenate([share.taps for share in shares]))
        self._spoil()
        watch = _Watch(self)
        for part in parts:
            watch.allow(part.request, part.request.computed, part.known)
        self.speculator.observe(batch, taps, stands)
        watch.check("observe")
        if self.clobber:
            given = (taps, stands.newest, stands.tokens, batch.input_ids, batch.positions, batch.seq_lens)
            for tensor in given:
                tensor.fill_(math.nan if tensor.is_floating_point() else 1)
            for array in (stands.rows, stands.starts, stands.counts, stands.sampled, batch.seq_lens_cpu):
                array.fill(1)

    # ---- drafts ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(self, requests: Sequence[Request], most: Sequence[int]) -> TokenTrees:
        """Ask for trees behind the tokens that come after those computed."""
        reserve = self.speculator.reserve
        for request in requests:
            self._allocate(request, request.computed + 1 + reserve)
        batch = DraftBatch(
            rows=np.array([request.row for request in requests]),
            seq_lens=np.array([request.computed + 1 for request in requests]),
            newest=np.array([request.text[request.computed] for request in requests]),
            most=np.array(most, np.int64),
            row_table=torch.from_numpy(self.table),
            kv_pool=self.pool,
        )
        self._spoil()
        watch = _Watch(self)
        for request in requests:
            watch.allow(request, request.computed, request.computed + 1 + reserve)
        trees = self.speculator.draft(batch)
        watch.check("draft")
        for request in requests:
            request.kept = request.computed + 1
        if self.clobber:
            for array in (batch.rows, batch.seq_lens, batch.newest, batch.most):
                array.fill(1)
        return trees

    # ---- memory ---------------------------------------------------------------------------------------------------

    def slots(self, request: Request, start: int, stop: int) -> Int64s:
        """Return the slots of positions [start, stop) of a request."""
        return self.table[request.row, start:stop].astype(np.int64)

    def own_buffers(self) -> list[torch.Tensor]:
        """Return keys and values of the speculator's own layers."""
        return [buffer for one in sorted(self.own) for buffer in (self.pool.keys(one), self.pool.values(one))]

    def _spoil(self) -> None:
        """Put poison where nothing is kept."""
        if self.poison is not None:
            free = torch.ones(self.pool.num_slots, dtype=torch.bool)
            for request in self.seated.values():
                free[_tensor(self.slots(request, 0, request.kept))] = False
            for buffer in self.own_buffers():
                buffer[free] = self.poison


class _Watch:
    """Knows where a call may write, and what was there before."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._strict = bench, bench.strict
        self._allowed = torch.zeros(bench.pool.num_slots, dtype=torch.bool)
        self._allowed[PADDING] = True
        if self._strict:
            self._before = [buffer.clone() for buffer in bench.own_buffers()]
            self._table = bench.table.copy()

    def allow(self, request: Request, start: int, stop: int) -> None:
        """Let positions [start, stop) of a request be written."""
        self._allowed[_tensor(self._bench.slots(request, start, stop))] = True

    def check(self, call: str) -> None:
        """Fail where anything else has been written. What is kept may be written again, as it was but for rounding."""
        __tracebackhide__ = True
        if not self._strict:
            return
        assert np.array_equal(self._table, self._bench.table), f"`{call}` changes the row table"
        for layer in SPEC.layers:
            for buffer in (self._bench.pool.keys(layer.layer_id), self._bench.pool.values(layer.layer_id)):
                assert bool(buffer.isnan().all()), f"`{call}` writes into layer {layer.layer_id}, which is the model's"
        for before, after in zip(self._before, self._bench.own_buffers(), strict=True):
            same = torch.isclose(before, after, rtol=1e-4, atol=1e-4, equal_nan=True).flatten(1).all(dim=1)
            stray = (~same & ~self._allowed).nonzero().flatten().tolist()
            assert not stray, f"`{call}` writes into the slots {stray} of its own layers: {_STRAY}"


def _mode(parts: Sequence[Part], shares: Sequence[_Share]) -> ForwardMode:
    if all(part.tree for part in parts):
        return ForwardMode.TARGET_VERIFY
    decodes = [
        part.tree or (len(share.ids) == 1 and not part.request.fresh) for part, share in zip(parts, shares, strict=True)
    ]
    if all(decodes) and not any(part.tree for part in parts) and all(part.sampled for part in parts):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(decodes) else ForwardMode.EXTEND


def _tensor(array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array)


_STRAY = (
    "it may write those of tokens that stand behind a cached prefix, of the newest token where there is room, and in "
    "`draft` of the newest token and `reserve` behind it"
)
