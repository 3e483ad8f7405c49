"""The runner that calls network, logits processors and sampler one after the other."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.model_runner import ModelEnds, ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.runner_layered.graphs import DecodeGraphs, why_not
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.prefill_graphs import PrefillGraphs
from pegboard.toolkit.graphs import default_sizes, prefill_sizes
from pegboard.toolkit.sampling.logprobs import prompt_logprobs
from pegboard.toolkit.sampling.sample import sample

if TYPE_CHECKING:
    from pegboard.core.interfaces.graphs import GraphCapture
    from pegboard.core.interfaces.weights import WeightStore

logger = logging.getLogger(__name__)


def _why_no_extends(ctx: ModelRunnerContext) -> str | None:
    """Return why prefills cannot be graphs where decode steps are, None where they can."""
    if ctx.spec.states:
        return "prefills of a model whose layers keep states cannot be graphs"
    if "graph_extend" in ctx.provides.get("attention", ()):
        return None
    return "prefills cannot be graphs with the chosen attention (without the capability graph_extend)"


class LayeredRunner(ModelRunner[LayeredOptions]):
    """Model family, attention backend, processors and sampler, each doing its own part.

    Hidden states are gathered before the vocabulary projection: logits exist for sampled rows only, and not at all in a
    batch that samples nothing. Decode steps and prefills are replayed where there is a graph for them.
    """

    def __init__(self, options: LayeredOptions, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        if ctx.network is None:
            raise ValueError("the layered runner needs a loaded network; ModelRunnerContext.network is None")
        self._network = ctx.network
        self._graphs: DecodeGraphs | None = None
        self._prefills: PrefillGraphs | None = None
        self._counts = {"replayed_steps": 0, "eager_decode_steps": 0}

    @classmethod
    def supports(cls, options: LayeredOptions, ctx: ModelRunnerContext) -> str | None:
        """Return None, or what keeps graphs from being recorded where they are insisted on."""
        if options.graphs != "on":
            return None
        if (reason := why_not(ctx)) is None:
            if not options.prefill_graph_sizes or (reason := _why_no_extends(ctx)) is None:
                return None
            return f"runner.prefill_graph_sizes: {reason}; set it to [] or leave it out"
        return f"runner.graphs is 'on', but {reason}; set it to auto or off"

    @classmethod
    def graph_sizes(cls, options: LayeredOptions, max_batch: int) -> tuple[int, ...]:
        if options.graphs == "off":
            return ()
        if options.graph_sizes is None:
            return default_sizes(max_batch)
        return tuple(sorted({min(size, max_batch) for size in options.graph_sizes}))

    def prefill_graph_sizes(self) -> tuple[int, ...]:
        if self.options.graphs == "off" or _why_no_extends(self.ctx) is not None or why_not(self.ctx) is not None:
            return ()
        wanted, most = self.options.prefill_graph_sizes, self.ctx.max_new_tokens
        sizes = prefill_sizes() if wanted is None else tuple(sorted(set(wanted)))
        return sizes if most is None else sizes[: bisect.bisect_left(sizes, most) + 1]

    @torch.inference_mode()
    def start(self, pool: KVPool, *row_tables: torch.Tensor, states: Mapping[str, torch.Tensor] | None = None) -> None:
        """Record graphs, or say once why there are none. Raises ConfigError where those of decode steps are insisted
        on.
        """
        capture, wanted = self.ctx.capture, self.options.graphs
        if wanted == "off" or (wanted == "auto" and capture is None):
            return
        reason = why_not(self.ctx)
        if reason is None and capture is not None:
            graphs = DecodeGraphs(self._network, self.ctx, capture)
            try:
                graphs.record(pool, *row_tables, states=states)
            except RuntimeError as error:
                reason = f"a decode step cannot be recorded: {error}"
            else:
                self._graphs = graphs
                reason = None if graphs.sizes else "there is no memory for any"
                self._record_prefills(capture, pool, row_tables)
        if reason is not None:
            if wanted == "on":
                raise ConfigError(f"runner.graphs is 'on', but {reason}; set it to auto or off")
            logger.warning("graphs are off, and every decode step calls its operators: %s", reason)

    def _record_prefills(self, capture: GraphCapture, pool: KVPool, row_tables: Sequence[torch.Tensor]) -> None:
        """Record the graphs of prefills, behind those of decode steps: whose memory they use, too."""
        if not (sizes := self.prefill_graph_sizes()):
            if self.options.prefill_graph_sizes:
                reason = _why_no_extends(self.ctx)
                logger.warning("runner.prefill_graph_sizes: %s, so prefills run without", reason)
            return
        graphs = PrefillGraphs(self._network, self.ctx, capture, sizes)
        try:
            graphs.record(pool, *row_tables)
        except RuntimeError as error:
            logger.warning("graphs: prefills run without, since one cannot be recorded: %s", error)
            return
        self._prefills = graphs
        self._counts |= {"replayed_prefills": 0, "eager_prefills": 0}

    def figures(self) -> dict[str, int]:
        return dict(self._counts) if self._graphs is not None else {}

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
        if self._graphs is not None and batch.forward_mode is ForwardMode.DECODE:
            if sampling is not None and not return_hidden_states and (logits := self._graphs.logits(batch)) is not None:
                return self._sampled(logits, sampling, return_logits)
            self._counts["eager_decode_steps"] += 1
        if self._prefills is not None and batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            if not return_hidden_states and (hidden := self._prefills.hidden(batch)) is not None:
                self._counts["replayed_prefills"] += 1
                return self._output(hidden, batch, sampling, return_logits, False)
            self._counts["eager_prefills"] += 1
        self.ctx.attention.prepare(batch)
        hidden = self._network.forward(batch)
        return self._output(hidden, batch, sampling, return_logits, return_hidden_states)

    @torch.inference_mode()
    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, *, return_logits: bool = False
    ) -> Generator[None, None, ForwardOutput]:
        self.ctx.attention.prepare(batch)
        hidden = yield from self._network.forward_in_parts(batch)
        return self._output(hidden, batch, sampling, return_logits, False)

    def ends(self) -> ModelEnds:
        return ModelEnds(self._network.embed, self._network.logits)

    def weights(self) -> WeightStore:
        return self._network.weights()

    def _sampled(self, logits: torch.Tensor, sampling: SamplingBatch, return_logits: bool) -> ForwardOutput:
        """Return what was sampled from the logits of a replay."""
        self._counts["replayed_steps"] += 1
        if len(sampling) != logits.shape[0]:
            raise ValueError(f"{len(sampling)} rows of sampling parameters for {logits.shape[0]} sampled rows")
        output = ForwardOutput(next_token_ids=self._no_tokens())
        sample(logits, sampling, self.ctx, output, return_logits=return_logits)
        return output

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
        if batch.logits_indices is not None:
            hidden = hidden.index_select(0, batch.logits_indices)
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
