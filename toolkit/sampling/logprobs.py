"""For runners and samplers: log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampling import LogprobRequest

BLOCK = 256
"""Rows of a prompt whose logits exist at one time: a whole prompt's would be as large as the vocabulary is wide."""


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    requests: Sequence[LogprobRequest | None],
    ids: torch.Tensor | None = None,
) -> LogprobOutput:
    """Return logprobs of `tokens` int64 [n] by `logits` float32 [n, vocab], and what each row's request adds: the
    largest ones (as many columns as the largest wish), and chosen ids. The logits stay as they are. What it returns for
    a row without a token has no meaning. With `ids`, see SamplingBatch.logprob_ids, it does not wait for the device.
    """
    table = logits.log_softmax(-1)
    output = LogprobOutput(table.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1))
    width = min(max((one.top for one in requests if one is not None), default=0), logits.shape[1])
    if width > 0:
        output.top_values, output.top_ids = torch.topk(table, width, dim=-1)
    start = 0
    for row, one in enumerate(requests):
        if one is not None and one.token_ids:
            stop = start + len(one.token_ids)
            own = torch.tensor(one.token_ids, device=table.device) if ids is None else ids[start:stop]
            output.chosen[row] = table[row].index_select(0, own)
            start = stop
    return output


def prompt_logprobs(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    requests: Sequence[LogprobRequest],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> LogprobOutput:
    """`token_logprobs` of the prompts' tokens that `rows` int64 [p] of hidden states [tokens, hidden] predict, block by
    block. `logits_of` is the network's vocabulary projection.
    """
    blocks = []
    for start in range(0, len(rows), BLOCK):
        stop = start + BLOCK
        logits = logits_of(hidden.index_select(0, rows[start:stop]))
        blocks.append(token_logprobs(logits, targets[start:stop], requests[start:stop]))
    return _joined(blocks)


def _joined(blocks: Sequence[LogprobOutput]) -> LogprobOutput:
    if len(blocks) == 1:
        return blocks[0]
    values = [one.top_values for one in blocks]
    ids = [one.top_ids for one in blocks]
    width = max((0 if one is None else one.shape[1] for one in values), default=0)
    output = LogprobOutput(torch.cat([one.token_logprobs for one in blocks]))
    if width:
        # A block whose requests want fewer is filled up with what is not read.
        output.top_values = torch.cat([_widened(one, width, block) for one, block in zip(values, blocks, strict=True)])
        output.top_ids = torch.cat([_widened(one, width, block) for one, block in zip(ids, blocks, strict=True)]).long()
    offset = 0
    for one in blocks:
        output.chosen.update((offset + row, chosen) for row, chosen in one.chosen.items())
        offset += len(one.token_logprobs)
    return output


def _widened(table: torch.Tensor | None, width: int, block: LogprobOutput) -> torch.Tensor:
    if table is None:
        return torch.zeros(len(block.token_logprobs), width, device=block.token_logprobs.device)
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
