"""The suite of ModelRunner must suit a runner that calls neither network, attention nor sampler of its context."""

from __future__ import annotations

from typing import Any

import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.rig.paged import PlainAttention
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput, LogprobOutput
from pegboard.core.interfaces.model_runner import ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.sampling.token_mask import apply_token_mask


class FusedRunner(ModelRunner):
    """Reads the weights itself, attends by itself, and samples greedily or from its own generator."""

    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        own = AttentionContext(ctx.spec.layers, 1, ctx.model.dtype, ctx.device, 8, ctx.spec.max_context_len)
        self.attention = PlainAttention(None, own)
        self.network = DenseFamily(DenseOptions(), ctx.model).load()
        self.generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def execute(
        self,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        *,
        return_logits: bool = False,
        return_hidden_states: bool = False,
    ) -> ForwardOutput:
        if return_hidden_states or batch.hidden_rows is not None:
            raise Unsupported("fused", "runner.hidden_states")
        if batch.logprob_rows is not None:
            raise Unsupported("fused", "runner.input_logprobs")
        if batch.overlay is not None:
            raise Unsupported("fused", "runner.overlay")
        if batch.taps is not None:
            raise Unsupported("fused", "runner.taps")
        output = ForwardOutput(torch.empty(0, dtype=torch.int64))
        if batch.num_tokens == 0:
            return output
        batch.attn_backend = self.attention
        self.attention.prepare(batch)
        hidden = self.network.forward(batch)
        if sampling is None:
            return output
        logits = self.network.logits(hidden if batch.logits_indices is None else hidden[batch.logits_indices])
        for processor in self.ctx.processors if sampling.rows else ():
            state = processor.prepare(sampling.rows)
            if state is not None:
                processor.apply(logits, state)
        apply_token_mask(logits, sampling)
        output.next_token_ids = self._sample(logits, sampling)
        output.logits = logits if return_logits else None
        if sampling.want_logprobs:
            output.logprobs = self._logprobs(logits, output.next_token_ids, sampling)
        return output

    def _sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        greedy = (sampling.temperatures == 0) | (sampling.top_ks == 1)
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.generator).squeeze(1)
        return torch.where(greedy, logits.argmax(-1), drawn)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, sampling: SamplingBatch) -> LogprobOutput:
        table = logits.log_softmax(-1)
        output = LogprobOutput(table.gather(1, tokens[:, None]).squeeze(1))
        wants = [(row, want) for row, want in enumerate(sampling.logprobs) if want is not None]
        width = max(want.top for _, want in wants)
        if width:
            output.top_values, output.top_ids = table.topk(width)
        output.chosen = {row: table[row, list(want.token_ids)] for row, want in wants if want.token_ids}
        return output


class TestFused(ModelRunnerContract):
    factory = FusedRunner
    provides = frozenset({"fused_sampling", "own_weights"})


class TestFusedInBfloat16(ModelRunnerContract):
    """An author of a runner for larger heads in bf16 says so, and the same tests measure it."""

    factory = FusedRunner
    provides = frozenset({"fused_sampling", "own_weights"})
    architecture = "qwen3"
    checkpoint_settings = {"head_dim": 64}
    dtype = "bfloat16"
    tolerance = 0.1
