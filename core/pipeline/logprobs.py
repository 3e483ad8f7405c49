"""Logprobs of sampled tokens, kept until they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import LogprobOutput
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import TokenValues

Entry = tuple[float, int, list[tuple[float, int]]]


def keep_logprobs(req: Req, row: int, source: LogprobOutput) -> None:
    """Keep those of a sampled row for the request whose token it brought, if it wants any."""
    kept = req.logprobs
    if kept is None:
        return
    kept.values.append(float(source.token_logprobs[row]))
    kept.tops.append(source.tops(row, kept.top))
    if kept.token_ids and row in source.chosen:
        kept.chosen.append(list(zip(source.chosen[row].tolist(), kept.token_ids, strict=True)))


def keep_first(req: Req, values: TokenValues) -> None:
    """Keep what a request wants of a first token that was drawn elsewhere."""
    kept = req.logprobs
    if kept is None or values.logprob is None:
        return
    kept.values.append(values.logprob)
    kept.tops.append(list(values.tops))
    if kept.token_ids:
        kept.chosen.append(list(values.chosen))


def entries(req: Req, ids: list[int]) -> list[Entry]:
    """Return logprobs of the tokens about to be sent; those of the requested ids follow the top ones."""
    kept = req.logprobs
    if kept is None:
        return []
    start = req.output.sent_len
    found = []
    for i, token in enumerate(ids, start=start):
        chosen = kept.chosen[i] if i < len(kept.chosen) else []
        found.append((kept.values[i], token, kept.tops[i] + chosen))
    return found
