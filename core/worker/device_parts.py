"""DeviceParts: what stages compute where batches run, as frozen dicts of the parts that override a method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from pegboard.core.interfaces.ahead import Wants
from pegboard.core.interfaces.errors import BadAnswer
from pegboard.core.interfaces.stage import DevicePart
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.system.taking_part import takes_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.ahead import Verified
    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput, LogprobOutput
    from pegboard.core.interfaces.trees import Accepted

R = TypeVar("R")
NOTHING = Wants()


def state_memory(parts: Sequence[DevicePart]) -> Mapping[str, torch.Tensor] | None:
    """Return the memory of states that attached parts bring, None where none brings any."""
    return next((part.state_memory for part in parts if part.states), None)


class DeviceParts:
    """The parts of one worker, `by_name` of their stages. They are asked about batches that bring them a payload."""

    def __init__(self, parts: Sequence[DevicePart] = ()) -> None:
        self.by_name = {part.name: part for part in parts}
        self._wanting = self._at("wants")
        self._accepting = self._at("accept")
        self._around = self._at("execute")

    def _at(self, point: str) -> dict[str, DevicePart]:
        """Return the parts that override a method."""
        return {name: part for name, part in self.by_name.items() if takes_part(DevicePart, part, point)}

    def wants(self, work: ModelWorkerBatch) -> Wants:
        """Return what all parts read of a pass."""
        if not self._wanting:
            return NOTHING
        asked = [part.wants(work.payloads[name]) for name, part in self._wanting.items() if name in work.payloads]
        states = dict.fromkeys(place for one in asked for place in one.states)
        return Wants(any(one.logits for one in asked), tuple(states))

    def within(self, work: ModelWorkerBatch, batch: ForwardBatch, run: Callable[[], R]) -> R:
        """Run a pass, or the first part of one, within what parts do around it."""
        for name, part in self._around.items():
            if name in work.payloads:
                run = partial(part.execute, work.payloads[name], batch, run)
        return run()

    def accept(self, work: ModelWorkerBatch, verified: Verified, output: ForwardOutput) -> Accepted:
        """Return what stands of tokens ahead by the first part that says so, and change the output's logprobs to match;
        otherwise what was drawn. Raises BadAnswer for what cannot stand.
        """
        for name, part in self._accepting.items():
            if name not in work.payloads:
                continue
            accepted = part.accept(work.payloads[name], verified)
            if accepted is None:
                continue
            most = np.iinfo(np.int64).max if verified.logits is None else verified.logits.shape[1]
            wrong = tree.accepted_fault(verified.trees, accepted, most)
            if wrong is not None:
                raise BadAnswer(f"accept(): {wrong}", part)
            if output.logprobs is not None and verified.logits is not None:
                output.logprobs = with_logprobs_of(output.logprobs, accepted, verified.drawn, verified.logits)
            return accepted
        return tree.walk(verified.trees, verified.drawn)

    def computed(
        self, work: ModelWorkerBatch, batch: ForwardBatch, output: ForwardOutput
    ) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return what the parts bring to the host, by name."""
        payloads = work.payloads.items()
        return {name: self.by_name[name].computed(payload, batch, output) for name, payload in payloads}


def with_logprobs_of(
    found: LogprobOutput, accepted: Accepted, drawn: NDArray[np.int64], logits: torch.Tensor
) -> LogprobOutput:
    """Return the logprobs of nodes with those of accepted tokens in place of the tokens `drawn` int64 [nodes]."""
    others = np.flatnonzero(accepted.tokens != drawn[accepted.nodes])
    if not others.shape[0]:
        return found
    nodes, tokens = _index(accepted.nodes[others], logits), _index(accepted.tokens[others], logits)
    values = found.token_logprobs.clone()
    values[nodes] = logits[nodes].log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    return replace(found, token_logprobs=values)


def _index(places: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places).to(like.device)
