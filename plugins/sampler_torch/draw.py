"""Drawing tokens: the largest logit with noise of those that the filters keep, with as little sorting as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.toolkit.sampling.filters import Filters
from pegboard.toolkit.sampling.noise import bits, gumbel, keys

_BLOCK = 256
_WIDTHS = (64, 256, 1024, 4096)
_NUCLEUS_WIDTH = 256
_TRIALS = 8
_TILE = 2**24
"""Numbers in float64 that are worked on at once, so that a large batch does not take gigabytes."""
_CPU_TILE = 2**18
"""The same on a CPU, where they stay in its caches."""


@dataclass(slots=True)
class Rows:
    """Rows to draw from: logits float32 [n, vocab], none of them NaN, and of each row [n] its largest logit, its
    temperature (above 0), the key of its noise, and its filters.
    """

    logits: torch.Tensor
    peaks: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor
    filters: Filters

    @classmethod
    def of(cls, logits: torch.Tensor, peaks: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> Rows:
        """Take `rows` int64 [n] of a batch, ascending and distinct; without a copy of the logits when they are all."""
        return cls(
            logits if len(rows) == len(logits) else logits.index_select(0, rows),
            peaks[rows],
            batch.temperatures[rows],
            keys(batch.seeds[rows], batch.steps[rows]),
            Filters.of(batch, rows, logits.shape[1]),
        )

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    def take(self, rows: torch.Tensor) -> Rows:
        """Return these rows, ascending and distinct; without a copy when they are all."""
        if len(rows) == len(self):
            return self
        return Rows(
            self.logits.index_select(0, rows),
            self.peaks.index_select(0, rows),
            self.temperatures.index_select(0, rows),
            self.keys.index_select(0, rows),
            self.filters.take(rows),
        )

    def tiles(self) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Yield the rows, a few at a time, with their numbers."""
        step = max(1, (_CPU_TILE if self.logits.is_cpu else _TILE) // self.vocab)
        for start in range(0, len(self), step):
            numbers = torch.arange(start, min(start + step, len(self)), device=self.logits.device)
            yield numbers, self.take(numbers)

    def mass(self) -> torch.Tensor:
        """Unnormalised probabilities float32 [n, vocab], 1 at the peak: exp((logit - peak) / temperature)."""
        return (self.logits - self.peaks[:, None]).div_(self.temperatures[:, None]).exp_()

    def ahead(self, logits: torch.Tensor) -> torch.Tensor:
        """(logit - peak) / temperature, float64 [n, m], of logits float32 [n, m]."""
        return (logits.to(torch.float64) - self.peaks[:, None]).div_(self.temperatures[:, None])

    def noise(self, ids: torch.Tensor) -> torch.Tensor:
        """Gumbel noise float64 [n, m] of token ids [m] or [n, m]."""
        return gumbel(bits(self.keys, ids))


def block_sums(mass: torch.Tensor) -> torch.Tensor:
    """Return sums float64 [n, blocks] of 256 columns each of float32 [n, vocab]; the last block may be shorter."""
    whole = mass.shape[1] // _BLOCK * _BLOCK
    parts = [mass[:, :whole].view(len(mass), -1, _BLOCK).sum(-1)] if whole else []
    if whole < mass.shape[1]:
        parts.append(mass[:, whole:].sum(-1, keepdim=True))
    return torch.cat(parts, dim=1).to(torch.float64)


def draw_from_all(rows: Rows) -> torch.Tensor:
    """Return token int64 [n] of rows without a top_k or a top_p."""
    tokens = torch.zeros_like(rows.keys)
    ids = torch.arange(rows.vocab, dtype=torch.int32, device=tokens.device)
    for numbers, tile in rows.tiles():
        tokens[numbers] = _noised(tile, ids).argmax(-1)
    return tokens


def _noised(rows: Rows, ids: torch.Tensor, mass: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits with noise, float64 [n, vocab]; minus infinity for tokens that have too little mass (min_p)."""
    noised = rows.ahead(rows.logits).add_(rows.noise(ids))
    least = rows.filters.least
    if bool((least > 0).any()):
        noised.masked_fill_((rows.mass() if mass is None else mass) < least[:, None], -torch.inf)
    return noised


def draw_from_top(rows: Rows) -> torch.Tensor:
    """Return token int64 [n] of rows with a top_k or a top_p.

    Each row looks at as few candidates as its filters need: 64, 256, 1024, 4096, and only then a sort of the whole row.
    A nucleus of more than 256 is looked for in the whole row first, and only where that fails does the row go on.
    Candidates stand in one order (larger logit first, smaller id among equals) and a row is drawn only once every
    token that ties with its last candidate is there, so that neither order nor cut depends on the width or on other
    rows. Whichever way a row goes, its token is the same.
    """
    vocab = rows.vocab
    top_ks = rows.filters.top_ks
    limited = top_ks < vocab
    totals = torch.zeros_like(rows.filters.top_ps)
    nucleus = (~limited).nonzero().squeeze(1)
    if len(nucleus):
        totals[nucleus] = block_sums(rows.take(nucleus).mass()).sum(-1)
    start = torch.where(limited, top_ks + 1, _NUCLEUS_WIDTH)
    tokens = torch.zeros_like(rows.keys)
    pending = torch.arange(len(rows), device=tokens.device)
    for width in (*(width for width in _WIDTHS if width < vocab), vocab):
        numbers = pending if width == vocab else pending[start[pending] <= width]
        if len(numbers) == 0:
            continue
        some = rows.take(numbers)
        values, ids = _largest(some.logits, width)
        ahead = some.ahead(values)
        kept, complete = _filter(values, ahead.exp(), some, totals[numbers], width == vocab)
        best = ahead.add_(some.noise(ids)).masked_fill_(~kept, -torch.inf).argmax(-1, keepdim=True)
        tokens[numbers] = ids.gather(1, best).squeeze(1)
        start[numbers[~complete]] = width + 1
        start[numbers[complete]] = vocab + 1
        pending = pending[start[pending] <= vocab]
        if width == _NUCLEUS_WIDTH and len(wide := pending[~limited[pending]]):
            tokens[wide] = _draw_from_wide(rows.take(wide), totals[wide])
            # In order again, as `take` asks.
            pending = torch.cat([pending[limited[pending]], wide[tokens[wide] < 0]]).sort().values
        if len(pending) == 0:
            break
    return tokens


def _draw_from_wide(rows: Rows, totals: torch.Tensor) -> torch.Tensor:
    """Return tokens int64 [n] of wide nuclei, -1 where none is found soon: one sum for each trial, and no sort.

    The best of all tokens is the best of the nucleus if it lies inside: if what stands before it, in the order of
    `draw_from_top`, is less than top_p of the mass. If not, the nucleus ends before it, and so the next best of those
    that stand before it is tried.
    """
    tokens = torch.full_like(rows.keys, -1)
    ids = torch.arange(rows.vocab, dtype=torch.int32, device=tokens.device)
    for numbers, tile in rows.tiles():
        mass, shares = tile.mass(), tile.filters.top_ps * totals[numbers]
        logits, noised = tile.logits, _noised(tile, ids, mass)
        for _ in range(_TRIALS):
            drawn = noised.argmax(-1, keepdim=True)
            value = logits.gather(1, drawn)
            before = (logits > value) | ((logits == value) & (ids < drawn))
            inside = block_sums(mass * before).sum(-1) < shares
            tokens[numbers[inside]] = drawn[inside].squeeze(1)
            left = (~inside).nonzero().squeeze(1)
            if len(left) == 0:
                break
            noised = noised.masked_fill_(~before, -torch.inf)[left]
            mass, shares, logits, numbers = mass[left], shares[left], logits[left], numbers[left]
    return tokens


def _largest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `width` largest logits, in descending order and by ascending id among equals, and their ids."""
    if width == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = torch.topk(logits, width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _filter(
    values: torch.Tensor, mass: torch.Tensor, rows: Rows, totals: torch.Tensor, is_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the largest logits, with their mass float64 [n, width], all filters keep, and whether a row saw
    all the candidates it needs.
    """
    stays = rows.filters.kept(mass, totals)
    count = stays.sum(-1)
    last = values.gather(1, (count - 1)[:, None]).squeeze(1)
    complete = (count < mass.shape[1]) & (last > values[:, -1]) | (mass[:, -1] == 0.0)
    return stays, torch.ones_like(complete) if is_all else complete
