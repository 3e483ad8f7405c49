"""Contract: executing one forward batch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.graphs import GraphCapture
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.model_family import ModelContext, Network
    from pegboard.core.interfaces.sampler import Sampler
    from pegboard.core.interfaces.sampling import SamplingBatch
    from pegboard.core.interfaces.weights import WeightStore


@dataclass(frozen=True, slots=True)
class ModelRunnerContext:
    """The chosen parts. A runner that computes attention or samples by itself may leave `attention` or `sampler`
    unused.

    `network` is None while `supports` is asked, before weights are loaded, and always for a runner with the capability
    `own_weights`. `explicit` are the contracts for which the config names a provider: a runner that would leave such a
    one unused declines. `provides` has the capabilities of the providers that were chosen, by contract.

    `kv_dtype` is the type in which the pool keeps KV, None for the model's: a runner with attention of its own declines
    what it does not know. `capture` records graphs on this device, None where there are none.
    A step has at most `max_new_tokens` new tokens, None: as many as the longest context.
    """

    spec: ModelSpec
    model: ModelContext
    network: Network | None
    attention: AttentionBackend
    sampler: Sampler
    processors: tuple[LogitsProcessor, ...]
    device: torch.device
    explicit: frozenset[str] = frozenset()
    provides: Mapping[str, frozenset[str]] = field(default_factory=dict)
    kv_dtype: torch.dtype | None = None
    capture: GraphCapture | None = None
    graph_sizes: tuple[int, ...] = ()
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """Both ends of a model, for parts that look ahead of it. `embed` takes ids int64 [n] and returns their embeddings
    [n, hidden] in the model's dtype; `logits` takes states [n, hidden] after a final norm and returns logits float32
    [n, vocab], a new tensor. They run where and when the model itself could.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]


class ModelRunner(Component[OptionsT, ModelRunnerContext]):
    """Runs the network over a batch, then processors and sampler on the sampled rows only."""

    @classmethod
    def graph_sizes(cls, options: OptionsT, max_batch: int) -> tuple[int, ...]:
        """Return the sizes of decode batches to capture as graphs, ascending, for the attention backend; () without
        `graph`.
        """
        return ()

    def prefill_graph_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens of the extend batches that `start` captures, ascending; () for none. Memory is
        kept for them.
        """
        return ()

    def start(
        self, pool: KVPool, *row_tables: torch.Tensor, states: Mapping[str, torch.Tensor] | None = None
    ) -> None:  # optional
        """Warm up and capture graphs: once, with memory sized, before any request. All batches use these `row_tables`,
        one for each KV group, and if the model's layers keep states, this memory of `states` (`BatchStates.memory`).
        """

    @abc.abstractmethod
    def execute(
        self,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        *,
        return_logits: bool = False,
        return_hidden_states: bool = False,
    ) -> ForwardOutput:
        """Run one batch: KV of all its tokens is in the pool afterwards.

        `sampling` has one row per sampled row, or is None when nothing is sampled (a chunk that does not end
        its prompt), and then `next_token_ids` is empty. Its `mask` is honoured after all processors and before
        sampling and logprobs, as `pegboard.toolkit.sampling.token_mask.apply_token_mask` does it. The logprobs
        that `sampling` asks for are returned, and with the capabilities for it what `batch.logprob_rows`,
        `batch.hidden_rows` and `batch.taps` ask for. An idle batch returns empty tensors. Raises Unsupported for those,
        and for `return_hidden_states`, without the capability.
        """

    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, *, return_logits: bool = False
    ) -> Generator[None, None, ForwardOutput]:
        """`execute`, paused after every layer; `execute` may run other batches in a pause (a prefill that makes way for
        decodes). The output is the generator's return value.

        This default has no pause. The capability `split_prefill` says that there is one per layer.
        """
        yield from ()
        return self.execute(batch, sampling, return_logits=return_logits)

    def ends(self) -> ModelEnds:
        """Lend the model's embedding and its head. Raises Unsupported without the capability `ends`."""
        raise Unsupported(f"the runner {type(self).__name__}", "ends")

    def weights(self) -> WeightStore:
        """Lend the model's weights, to replace them: those of its network, if it runs one. Raises Unsupported."""
        raise Unsupported(f"the runner {type(self).__name__}", "updates")

    def numerics(self) -> str:
        """Name what of its options changes the KV that it computes, "" for nothing: KV that is kept on a disk is not
        found by a runner that would have computed another.
        """
        return ""

    def stage_times(self) -> dict[str, float]:
        """Return seconds spent in each stage of the forward passes since the last call, by the stages' names in their
        order.

        Empty where the runner does not measure, as here. It must cost next to nothing: it is on all the time.
        """
        return {}

    def figures(self) -> dict[str, int]:
        """Return what it has counted since it was built, by name: `runner` in `/server_info`. Empty, as here, where it
        counts nothing. One that replays graphs counts `replayed_steps` and `eager_decode_steps`, and
        where there are graphs of prefills `replayed_prefills` and `eager_prefills`.
        """
        return {}

    def weight_bytes(self) -> int | None:
        """Return the bytes of all matrices that a decode step multiplies by, as stored; None, as here: not known."""
        return None
