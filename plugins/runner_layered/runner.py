"""The runner that calls network, logits processors and sampler one after the other."""

from __future__ import annotations

from collections.abc import Generator

import torch

from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput
from pegboard.core.interfaces.model_runner import ModelEnds, ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.toolkit.sampling.logprobs import prompt_logprobs
from pegboard.core.toolkit.sampling.sample import sample


class LayeredRunner(ModelRunner[NoOptions]):
    """Model family, attention backend, processors and sampler, each doing its own part.

    Hidden states are gathered before the vocabulary projection: logits exist for sampled rows only, and not at all in a
    batch that samples nothing.
    """

    def __init__(self, options: NoOptions, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        if ctx.network is None:
            raise ValueError("the layered runner needs a loaded network; ModelRunnerContext.network is None")
        self._network = ctx.network

    @torch.inference_mode()
    def execute(
        self,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        *,
        return_logits: bool = False,
        return_hidden_states: bool = False,
    ) -> ForwardOutput:
        if batch.forward_mode is ForwardMode.IDLE or batch.num_tokens == 0:
            return self._empty(return_logits, return_hidden_states)
        self.ctx.attention.prepare(batch)
        hidden = self._network.forward(batch)
        return self._output(hidden, batch, sampling, return_logits, return_hidden_states)

    @torch.inference_mode()
    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None
    ) -> Generator[None, None, ForwardOutput]:
        self.ctx.attention.prepare(batch)
        hidden = yield from self._network.forward_in_parts(batch)
        return self._output(hidden, batch, sampling, False, False)

    def ends(self) -> ModelEnds:
        return ModelEnds(self._network.embed, self._network.logits)

    def _output(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        return_logits: bool,
        return_hidden_states: bool,
    ) -> ForwardOutput:
        """Return what is wanted of last hidden states [tokens, hidden]."""
        output = ForwardOutput(next_token_ids=self._no_tokens())
        if batch.hidden_rows is not None:
            output.row_states = hidden.index_select(0, batch.hidden_rows)
        if batch.logprob_rows is not None and batch.logprob_targets is not None:
            output.prompt_logprobs = prompt_logprobs(
                hidden, batch.logprob_rows, batch.logprob_targets, batch.logprob_requests, self._network.logits
            )
        if sampling is None and not (return_logits or return_hidden_states):
            return output
        if batch.sample_rows is not None:
            hidden = hidden.index_select(0, batch.sample_rows)
        if return_hidden_states:
            output.hidden_states = hidden
        if sampling is not None:
            self._sample(hidden, sampling, output, return_logits)
        elif return_logits:
            output.logits = self._network.logits(hidden)
        return output

    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingBatch, output: ForwardOutput, return_logits: bool
    ) -> None:
        if len(sampling) != hidden.shape[0]:
            raise ValueError(f"{len(sampling)} rows of sampling parameters for {hidden.shape[0]} sampled rows")
        if len(sampling) == 0:
            output.logits = self._empty(return_logits, False).logits
            return
        logits = self._network.logits(hidden)
        sample(logits, sampling, self.ctx, output, return_logits=return_logits)

    def _no_tokens(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.ctx.device)

    def _empty(self, return_logits: bool, return_hidden_states: bool) -> ForwardOutput:
        spec, device = self.ctx.spec, self.ctx.device
        output = ForwardOutput(next_token_ids=self._no_tokens())
        if return_logits:
            output.logits = torch.empty(0, spec.vocab_size, device=device)
        if return_hidden_states:
            output.hidden_states = torch.empty(0, spec.hidden_size, dtype=self.ctx.model.dtype, device=device)
        return output
