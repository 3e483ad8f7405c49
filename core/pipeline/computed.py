"""Computed: what a step brings to the host, laid out as tensors that can go there together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import LogprobOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pegboard.core.interfaces.batch import WantedRows
    from pegboard.core.interfaces.forward import ForwardOutput
    from pegboard.core.interfaces.pooler import Pooler


@dataclass(slots=True)
class Computed:
    """`tensors`, tokens first, in the order in which `result` takes them apart again."""

    tensors: list[torch.Tensor]
    logprobs: LogprobOutput | None = None
    prompt_logprobs: LogprobOutput | None = None
    states: list[str] = field(default_factory=list)
    """Fields of BatchResult that the last tensors are."""

    @classmethod
    def of(cls, output: ForwardOutput, wanted: WantedRows | None, pooler: Pooler | None) -> Computed:
        """Return what a step has computed for the host; pooled states as the pooler reduces them."""
        found = cls([output.next_token_ids], output.logprobs, output.prompt_logprobs)
        for logprobs in (output.logprobs, output.prompt_logprobs):
            if logprobs is not None:
                found.tensors += _parts(logprobs)
        states = output.row_states
        if wanted is not None and states is not None:
            found._add_states(states, wanted, pooler)
        return found

    def _add_states(self, states: torch.Tensor, wanted: WantedRows, pooler: Pooler | None) -> None:
        count = wanted.pool_rows.shape[0]
        if count:
            assert pooler is not None
            self.states.append("pooled")
            self.tensors.append(pooler.reduce(states[:count], wanted.pool_spans).float())
        if states.shape[0] > count:
            self.states.append("hidden")
            self.tensors.append(states[count:].float())

    def result(self, arrived: Sequence[torch.Tensor]) -> BatchResult:
        """Return it from the tensors on the host."""
        tokens, *rest = arrived
        result = BatchResult(tokens.numpy())
        if rest:
            there = iter(rest)
            result.logprobs = _joined(self.logprobs, there)
            result.prompt_logprobs = _joined(self.prompt_logprobs, there)
            for name in self.states:
                setattr(result, name, next(there).numpy())
        return result


def _parts(logprobs: LogprobOutput) -> list[torch.Tensor]:
    """Return the tensors of logprobs."""
    some = (logprobs.token_logprobs, logprobs.top_values, logprobs.top_ids, *logprobs.chosen.values())
    return [one for one in some if one is not None]


def _joined(like: LogprobOutput | None, there: Iterator[torch.Tensor]) -> LogprobOutput | None:
    """Return logprobs with their tensors on the host."""
    if like is None:
        return None
    return LogprobOutput(
        next(there),
        None if like.top_values is None else next(there),
        None if like.top_ids is None else next(there),
        {row: next(there) for row in like.chosen},
    )
