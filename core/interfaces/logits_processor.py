"""Contract: changing a batch's logits before sampling."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.on_device import on_device
from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.on_device import Bring, HostArray
    from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
    from pegboard.core.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    """Vocabulary size, device of the logits, the token ids that end an output, and the tokenizer, for parameters that
    are texts (None only where there is no text at all). `bring` takes arrays to the device, see `on_device`.
    """

    vocab_size: int
    device: torch.device
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None = None
    bring: Bring | None = None

    def on_device(self, *arrays: HostArray) -> tuple[torch.Tensor, ...]:
        """Return arrays where the logits are. All of a step's should come together: each call is one copy, and none
        waits for the device. On a CPU the tensors share the arrays' memory.
        """
        return on_device(self.device, self.bring, arrays)


class LogitsProcessor(Component[OptionsT, LogitsProcessorContext]):
    """One vectorised change of logits. Processors run in the config's order.

    What it must remember of a request from step to step it keeps in `SamplingRow.memo`, under itself as the key. Steps
    may be repeated (a batch that failed is run again in halves), and a request may miss some (it is retracted): count
    by the row's tokens and not by the calls. All calls but `wants` come from one thread.

    With the capability `params` a request may name it, with parameters: `SamplingParams.extra[<provider's name>]`, a
    dict of plain values from the network (see toolkit.custom_params). Others never see any.
    """

    reads_output = True
    """Whether `prepare` reads `SamplingRow.output_ids`. The overlap loop must then wait for a request's newest token
    before its next step; a processor that only counts tokens (`SamplingRow.generated`) or reads the parameters says
    False."""

    @abc.abstractmethod
    def wants(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters takes part. Asked once per request; a batch without one costs
        nothing. Raises InvalidRequest, naming the parameter, for what it cannot do: the request is refused.
        """

    @abc.abstractmethod
    def prepare(self, rows: Sequence[SamplingRow]) -> Any:
        """Return the state of one step from all rows of the batch, also those that take no part; None: nothing is to
        do.
        """

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor, state: Any) -> None:
        """Change `logits` float32 [n, vocab] in place. Called only with a state that is not None.

        Minus infinity rules a token out. A row must keep a finite logit, or its request fails; so where the request has
        a constraint, which may allow nothing but what is forbidden here, a forbidden token gets
        `toolkit.logit_pairs.LAST_RESORT`: it is drawn only where nothing else is left.
        """
