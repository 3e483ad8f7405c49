"""Computed: what a step brings to the host, laid out as tensors that can go there together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import LogprobOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import ForwardOutput


@dataclass(slots=True)
class Computed:
    """`tensors`, tokens first, in the order in which `result` takes them apart again; `names` are those of the last
    ones: each a stage's, and its DevicePart's own.
    """

    tensors: list[torch.Tensor]
    logprobs: LogprobOutput | None
    names: list[tuple[str, str]]

    @classmethod
    def of(cls, output: ForwardOutput, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> Computed:
        """Return what a step has computed for the host, `parts` by their stages' names."""
        tensors = [output.next_token_ids]
        if output.logprobs is not None:
            tensors += _parts(output.logprobs)
        names = [(stage, name) for stage, found in parts.items() for name in found]
        return cls([*tensors, *(parts[stage][name] for stage, name in names)], output.logprobs, names)

    def result(self, arrived: Sequence[torch.Tensor]) -> BatchResult:
        """Return it from the tensors on the host."""
        tokens, *rest = arrived
        result = BatchResult(tokens.numpy())
        if rest:
            there = iter(rest)
            result.logprobs = _joined(self.logprobs, there)
            parts: dict[str, dict[str, NDArray[np.generic]]] = {}
            for stage, name in self.names:
                parts.setdefault(stage, {})[name] = next(there).numpy()
            result.parts = parts
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
