"""Drawing tokens: counter-based uniforms, and inverse distribution functions that sort as little as they can."""

from __future__ import annotations

import torch

_GAMMA = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
_BLOCK = 256
_WIDTHS = (64, 256, 1024, 4096)
_NUCLEUS_WIDTH = 256
_TRIALS = 8
_NEXT_TRIAL = 0x2545F4914F6CDD1D


def uniforms(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """float64 [n] in [0, 1), a function of seed and step (int64 [n]) alone.

    A counter-based generator: the seed and then the step go through splitmix64's finaliser (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014), in int64, which wraps. The top 53 bits make the fraction.
    """
    bits = _mix(_mix(seeds + _GAMMA) + (steps + 1) * _GAMMA)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def weights(logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities float32 [n, vocab], 1 at the peak: exp((logit - peak) / temperature)."""
    return (logits - peaks[:, None]).div_(temperatures[:, None]).exp_()


def block_sums(mass: torch.Tensor) -> torch.Tensor:
    """Sums float64 [n, blocks] of 256 columns each of float32 [n, vocab]; the last block may be shorter."""
    whole = mass.shape[1] // _BLOCK * _BLOCK
    parts = [mass[:, :whole].view(len(mass), -1, _BLOCK).sum(-1)] if whole else []
    if whole < mass.shape[1]:
        parts.append(mass[:, whole:].sum(-1, keepdim=True))
    return torch.cat(parts, dim=1).to(torch.float64)


def draw_from_all(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Column int64 [n] by the inverse distribution function of `mass` float32 [n, vocab], in the order of the columns.

    Two levels (block, then column in it), so that nothing as long as the vocabulary is accumulated or sorted.
    """
    cumulated = block_sums(mass).cumsum(-1)
    block, rest = _invert(cumulated, uniform * cumulated[:, -1])
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inside = mass.gather(1, columns.clamp(max=mass.shape[1] - 1)).to(torch.float64)
    inside.masked_fill_(columns >= mass.shape[1], 0.0)
    column, _ = _invert(inside.cumsum(-1), rest)
    return block * _BLOCK + column


def _invert(cumulated: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulated mass exceeds the target, and how far the target reaches into it.

    The target is kept below the total, so that rounding never picks an entry without mass.
    """
    total = cumulated[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = (cumulated <= target[:, None]).sum(-1)
    before = cumulated.gather(1, (index - 1).clamp(min=0)[:, None]).squeeze(1)
    return index, target - torch.where(index > 0, before, 0.0)


def draw_from_top(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    """Token int64 [n] of rows with a top_k or a top_p, by the inverse distribution function over the largest logits.

    Each row looks at as few candidates as its filters need: 64, 256, 1024, 4096, and only then a sort of the whole row.
    A nucleus of more than 256 is drawn from by rejection, and only where that fails does the row go on. Candidates
    stand in one order (larger logit first, smaller id among equals) and a row is drawn only once every token that ties
    with its last candidate is there, so that neither order nor cut depends on the width or on other rows.
    """
    vocab = logits.shape[1]
    uniform = uniforms(seeds, steps)
    limited = top_ks < vocab
    totals = torch.zeros_like(uniform)
    nucleus = (~limited).nonzero().squeeze(1)
    if len(nucleus):
        totals[nucleus] = block_sums(weights(logits[nucleus], peaks[nucleus], temperatures[nucleus])).sum(-1)
    start = torch.where(limited, top_ks + 1, _NUCLEUS_WIDTH)
    tokens = torch.zeros_like(top_ks)
    pending = torch.arange(len(logits), device=logits.device)
    for width in (*(width for width in _WIDTHS if width < vocab), vocab):
        rows = pending if width == vocab else pending[start[pending] <= width]
        if len(rows) == 0:
            continue
        every = len(rows) == len(logits)
        values, ids = _largest(logits if every else logits[rows], width)
        mass = ((values.to(torch.float64) - peaks[rows, None]) / temperatures[rows, None]).exp_()
        kept, complete = _filter(values, mass, top_ks[rows], top_ps[rows], totals[rows], width == vocab)
        kept.masked_fill_(kept < min_ps[rows, None], 0.0)
        cumulated = kept.cumsum(-1)
        index, _ = _invert(cumulated, uniform[rows] * cumulated[:, -1])
        tokens[rows] = ids.gather(1, index[:, None]).squeeze(1)
        start[rows[~complete]] = width + 1
        start[rows[complete]] = vocab + 1
        pending = pending[start[pending] <= vocab]
        if width == _NUCLEUS_WIDTH and len(wide := pending[~limited[pending]]):
            tokens[wide] = _reject(logits, peaks, temperatures, top_ps, min_ps, totals, seeds, steps, wide)
            missed = wide[tokens[wide] < 0]
            # The first number has been used, and what it did not lead to is no longer as likely.
            uniform[missed] = uniforms(_of_trial(seeds[missed], _TRIALS), steps[missed])
            pending = torch.cat([pending[limited[pending]], missed])
        if len(pending) == 0:
            break
    return tokens


def _of_trial(seeds: torch.Tensor, trial: int) -> torch.Tensor:
    """Other seeds for another trial: the numbers that follow from them have nothing to do with the first ones."""
    return seeds + ((trial * _NEXT_TRIAL + 2**63) % 2**64 - 2**63)


def _reject(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    temperatures: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    totals: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Tokens int64 [rows] of wide nuclei: drawn from the whole row until one lies inside, -1 where none does so soon.

    A token lies inside if what stands before it, in the order of `draw_from_top`, is less than top_p of the mass: one
    sum, and no sort. Whatever the trials give, a row that goes on to another way to draw has the same distribution.
    """
    tokens = torch.full_like(rows, -1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    left = torch.arange(len(rows), device=rows.device)
    for trial in range(_TRIALS):
        here = rows[left]
        own, mass = logits[here], weights(logits[here], peaks[here], temperatures[here])
        drawn = draw_from_all(mass, uniforms(_of_trial(seeds[here], trial), steps[here]))[:, None]
        value = own.gather(1, drawn)
        before = (own > value) | ((own == value) & (ids < drawn))
        inside = block_sums(mass * before).sum(-1) < top_ps[here] * totals[here]
        inside &= mass.gather(1, drawn).squeeze(1) >= min_ps[here]
        tokens[left[inside]] = drawn[inside].squeeze(1)
        left = left[~inside]
        if len(left) == 0:
            break
    return tokens


def _largest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest logits, in descending order and by ascending id among equals, and their ids."""
    if width == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = torch.topk(logits, width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _filter(
    values: torch.Tensor,
    mass: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    totals: torch.Tensor,
    is_all: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mass float64 [n, width] with what top_k and top_p drop set to 0, and whether a row saw all candidates it needs.

    top_p keeps the shortest head whose share of the mass (after top_k) reaches it: a token stays if what stands before
    it is less than that.
    """
    width = mass.shape[1]
    rank = torch.arange(width, device=mass.device)
    limited = top_ks < width
    head = mass.masked_fill(rank >= top_ks[:, None], 0.0)
    cumulated = head.cumsum(-1)
    total = torch.where(limited, cumulated[:, -1], totals)
    stays = (cumulated - head < (top_ps * total)[:, None]) | (top_ps >= 1.0)[:, None]
    stays &= rank < top_ks[:, None]
    count = stays.sum(-1)
    last = values.gather(1, (count - 1)[:, None]).squeeze(1)
    complete = (count < width) & (last > values[:, -1]) | (mass[:, -1] == 0.0)
    return head.masked_fill_(~stays, 0.0), torch.ones_like(complete) if is_all else complete
