"""Batches as differences from what followers know: a decode step of the same requests is their tokens and new slots.

Both ends keep the row table, each row's length, and the requests of the last step. What follows from these is not sent:
positions, lengths, and the slots of new tokens. `Encoder` compares, and sends in full what does not follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import numpy as np

from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.plugins.parallel.arrays import array, pack, unpack
from pegboard.plugins.parallel.messages import Table, encode
from pegboard.plugins.parallel.part import NAME, Stamp
from pegboard.toolkit.model.ranks import PENDING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

MODES = tuple(ForwardMode)

Runs: TypeAlias = tuple[bytes, bytes, bytes]
"""Changes of the row table: int64 places, int32 lengths, int32 slots of runs of neighbouring places with neighbouring
slots."""

Wanted = Literal["all", "last", "some"]
"""Which tokens' logits are wanted: of all of them, of each request's last, or of those that are listed."""


class Fields(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A batch. Arrays are int32, and empty where they follow: `rows` are those of the step before, `lens` (new tokens)
    1 each, `prefixes` the rows' lengths, `tokens` not known to the host, `positions` and `slots` by the row table.
    """

    bid: int
    mode: int
    sampled: bool
    table: Runs | None = None
    rows: bytes = b""
    lens: bytes = b""
    prefixes: bytes = b""
    tokens: bytes = b""
    future: bytes | None = None
    wanted: Wanted = "all"
    indices: bytes = b""
    positions: bytes = b""
    slots: bytes = b""
    common_prefix: int = 0
    extras: dict[str, bytes] = {}
    payloads: dict[str, bytes] = {}


class _Rows:
    """What both ends know: the row table, each row's length after its last step, and the rows of the last step."""

    def __init__(self, rows: int, width: int) -> None:
        self.table = np.zeros((rows, width), np.int32)
        self.width = width
        self.lens = np.zeros(rows, np.int64)
        self.last = np.empty(0, np.int64)

    def change(self, table: TableChanges | None) -> None:
        if table is not None:
            self.table.reshape(-1)[table.places] = table.slots

    def note(self, rows: NDArray[np.int64], seq_lens: NDArray[np.int64]) -> None:
        self.lens[rows], self.last = seq_lens, rows

    def slots(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], lens: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the slots int64 [tokens] of new tokens."""
        places = rows if lens.shape[0] == positions.shape[0] else rows.repeat(lens)
        found: NDArray[np.int64] = self.table[places, positions].astype(np.int64)
        return found


def positions_of(prefixes: NDArray[np.int64], lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions int64 [tokens] of packed new tokens."""
    firsts = np.cumsum(lens, dtype=np.int64) - lens
    found: NDArray[np.int64] = np.arange(int(lens.sum()), dtype=np.int64) + np.repeat(prefixes - firsts, lens)
    return found


def _small(values: NDArray[np.int64]) -> bytes:
    return values.astype(np.int32).tobytes()


def _wide(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int32).astype(np.int64)


def runs_of(table: TableChanges) -> Runs:
    """Return changes of the row table as runs."""
    places, slots = table.places, table.slots
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(slots) != 1)) + 1
    firsts = np.concatenate([[0], breaks]) if places.shape[0] else breaks
    lengths = np.diff(np.append(firsts, places.shape[0]))
    return places[firsts].astype(np.int64).tobytes(), _small(lengths), slots[firsts].astype(np.int32).tobytes()


def changes_of(runs: Runs) -> TableChanges:
    """Return what `runs_of` was given."""
    places, slots, lengths = np.frombuffer(runs[0], np.int64), np.frombuffer(runs[2], np.int32), _wide(runs[1])
    within = np.arange(int(lengths.sum())) - (lengths.cumsum() - lengths).repeat(lengths)
    return TableChanges(places.repeat(lengths) + within, (slots.repeat(lengths) + within).astype(np.int32))


class Encoder:
    """The leader's end. `rows` and `width` are those of the row table."""

    def __init__(self, rows: int, width: int) -> None:
        self._known = _Rows(rows, width)

    def table(self, table: TableChanges) -> Table:
        """Return changes of the row table, which come without a batch."""
        self._known.change(table)
        return Table(runs_of(table))

    def batch(self, work: ModelWorkerBatch, stamp: Stamp) -> bytes:
        """Return a batch for followers. Raises ValueError for what they cannot compute."""
        if work.part is not None or work.tail_bits is not None or work.positions.ndim != 1:
            raise ValueError(
                "split prefills, trees of tokens and positions of several axes are not sent to other ranks"
            )
        known, rows, lens, prefixes = self._known, work.rows, work.extend_lens, work.prefix_lens
        known.change(work.table)
        positions = positions_of(prefixes, lens)
        slots, (wanted, indices) = known.slots(rows, positions, lens), _wanted(work)
        tokens, future = _tokens(work)
        fields = Fields(
            bid=work.bid,
            mode=MODES.index(work.forward_mode),
            sampled=stamp.sampled,
            table=None if work.table is None else runs_of(work.table),
            rows=b"" if np.array_equal(rows, known.last) else _small(rows),
            lens=b"" if bool((lens == 1).all()) else _small(lens),
            prefixes=b"" if np.array_equal(prefixes, known.lens[rows]) else _small(prefixes),
            tokens=tokens,
            future=future,
            wanted=wanted,
            indices=indices,
            positions=b"" if np.array_equal(positions, work.positions) else _small(work.positions),
            slots=b"" if np.array_equal(slots, work.out_cache_loc) else _small(work.out_cache_loc),
            common_prefix=work.common_prefix,
            extras={name: pack(value) for name, value in work.extras.items() if name != PENDING},
            payloads={name: pack(payload) for name, payload in work.payloads.items() if name != NAME},
        )
        known.note(rows, work.seq_lens)
        return encode(fields)


def _tokens(work: ModelWorkerBatch) -> tuple[bytes, bytes | None]:
    """Return the ids, none where all of them are unknown, and which are."""
    future = work.future_indices
    if future is None:
        return _small(work.input_ids), None
    if future.shape == work.input_ids.shape:
        return b"", b""
    return _small(work.input_ids), _small(future)


def _wanted(work: ModelWorkerBatch) -> tuple[Wanted, bytes]:
    indices = work.logits_indices
    if indices is None:
        return "all", b""
    if np.array_equal(indices, work.extend_lens.cumsum() - 1):
        return "last", b""
    return "some", _small(indices)


class Decoder:
    """A follower's end. `payloads` has the types of payloads that its device parts take."""

    def __init__(self, rows: int, width: int, payloads: Mapping[str, type]) -> None:
        self._known = _Rows(rows, width)
        self._payloads = payloads
        self._fields = msgspec.msgpack.Decoder(Fields)

    def table(self, message: Table) -> TableChanges:
        """Return changes of the row table, which come without a batch."""
        changes = changes_of(message.runs)
        self._known.change(changes)
        return changes

    def batch(self, data: bytes) -> ModelWorkerBatch:
        """Return the batch, without what only rank 0 needs. Raises msgspec.ValidationError for anything else."""
        fields, known = self._fields.decode(data), self._known
        changes = None if fields.table is None else changes_of(fields.table)
        known.change(changes)
        rows = _wide(fields.rows) if fields.rows else known.last
        lens = _wide(fields.lens) if fields.lens else np.ones(rows.shape[0], np.int64)
        prefixes = _wide(fields.prefixes) if fields.prefixes else known.lens[rows]
        positions = positions_of(prefixes, lens)
        tokens = _wide(fields.tokens) if fields.tokens else np.zeros(positions.shape[0], np.int64)
        known.note(rows, prefixes + lens)
        return ModelWorkerBatch(
            bid=fields.bid,
            forward_mode=MODES[fields.mode],
            input_ids=tokens,
            positions=_wide(fields.positions) if fields.positions else positions,
            rows=rows,
            seq_lens=prefixes + lens,
            extend_lens=lens,
            prefix_lens=prefixes,
            out_cache_loc=_wide(fields.slots) if fields.slots else known.slots(rows, positions, lens),
            logits_indices=_indices(fields, lens),
            sampling=None,
            sampled_rows=np.empty(0, np.int64),
            future_indices=_future(fields, tokens),
            table=changes,
            common_prefix=fields.common_prefix,
            extras=_extras(fields),
            payloads=self._unpacked(fields),
        )

    def _unpacked(self, fields: Fields) -> dict[str, object]:
        payloads = {name: unpack(data, self._payloads[name]) for name, data in fields.payloads.items()}
        return payloads | {NAME: Stamp(0, fields.sampled)}


def _future(fields: Fields, tokens: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if fields.future is None:
        return None
    return _wide(fields.future) if fields.tokens else np.arange(tokens.shape[0])


def _extras(fields: Fields) -> dict[str, object]:
    extras = {name: _extra(msgspec.msgpack.decode(data)) for name, data in fields.extras.items()}
    return extras if fields.future is None else extras | {PENDING: True}


def _indices(fields: Fields, lens: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if fields.wanted == "all":
        return None
    return lens.cumsum() - 1 if fields.wanted == "last" else _wide(fields.indices)


def _extra(value: object) -> object:
    """Return an array for what `pack` made of one."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[2], bytes):
        return array(value)
    return value
