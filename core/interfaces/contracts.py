"""The table of the core's contracts: names, versions, cardinalities, capabilities, and where each is in the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract

if TYPE_CHECKING:
    from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext
    from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
    from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
    from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
    from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
    from pegboard.core.interfaces.model_family import ModelContext, ModelFamily
    from pegboard.core.interfaces.model_runner import ModelRunner, ModelRunnerContext
    from pegboard.core.interfaces.model_source import ModelSource, ModelSourceContext
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard.core.interfaces.sampler import Sampler, SamplerContext
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
    from pegboard.core.interfaces.token_allocator import TokenAllocator, TokenAllocatorContext

_I = "pegboard.core.interfaces"
_S = "pegboard.conformance"

MODEL_SOURCE: Contract[ModelSource, ModelSourceContext] = Contract(
    "model_source",
    "model.source",
    Cardinality.MATCHED,
    f"{_I}.model_source:ModelSource",
    "turns a model reference into a local directory, and its tokenizer",
)

MODEL_FAMILY: Contract[ModelFamily, ModelContext] = Contract(
    "model_family",
    "model",
    Cardinality.MATCHED,
    f"{_I}.model_family:ModelFamily",
    "builds the network of an architecture and loads its weights",
    suite=f"{_S}.model_family:ModelFamilyContract",
    capabilities={
        "additions": "its networks honour ForwardBatch.additions, and name their sites",
        "graph": "its networks ask for the same operations for all decode batches of a size, whatever the numbers",
        "kv_scales": "reads the scales of 8-bit KV that a checkpoint has",
        "overlay": "its networks honour ForwardBatch.overlay, and positions of three axes where they have them",
        "ranks": "its networks compute the share of a rank, where ModelContext.services has `ranks`",
        "sections": "its networks compute a section of the layers, where `ranks` has several: see Network.forward",
        "taps": "its networks fill ForwardBatch.taps, and show their embeddings",
        "updates": "its networks lend their weights, to replace them",
    },
)

RUNNER: Contract[ModelRunner, ModelRunnerContext] = Contract(
    "runner",
    "runner",
    Cardinality.ONE,
    f"{_I}.model_runner:ModelRunner",
    "executes one forward batch: logits, processors, sampling",
    suite=f"{_S}.model_runner:ModelRunnerContract",
    capabilities={
        "additions": "honours ForwardBatch.additions, where the network's family does",
        "ends": "lends the model's embedding and head, where the network's family shows them",
        "fused_sampling": "samples inside the forward call, without materialising logits where nothing reads them",
        "graph": "replays captured graphs for decode steps",
        "hidden_states": "returns the last hidden states of the sampled rows, or of any others, when asked",
        "input_logprobs": "returns the logprobs of prompts' tokens when asked",
        "layer_watch": "honours ForwardBatch.watch: for runners that compute attention themselves",
        "overlay": "honours ForwardBatch.overlay, and positions of three axes where the model has them",
        "own_attention": "computes attention itself: nothing of the attention backend is used, and its own `tree_mask` "
        "counts instead of the backend's",
        "own_weights": "reads the weights from the model's directory itself: no network is loaded for it",
        "prefers_mixed": "takes less time for a prompt's chunk with running requests' tokens than for both in "
        "turn: `scheduler.mixed_chunk` is on where it is unset",
        "ranks": "asks the network for the logits of the same rows wherever return_logits is set, tokens drawn or not",
        "sections": "reads no last hidden states but those of logits_indices, logprob_rows and hidden_rows",
        "split_prefill": "execute_in_parts pauses after every layer, where the network's family does",
        "taps": "fills ForwardBatch.taps, where the network's family does",
        "tree_mask": "honours ForwardBatch.tail_bits: for runners that compute attention themselves",
        "updates": "lends the model's weights, to replace them, where the network's family does",
    },
)

ATTENTION: Contract[AttentionBackend, AttentionContext] = Contract(
    "attention",
    "attention",
    Cardinality.ONE,
    f"{_I}.attention:AttentionBackend",
    "extend and decode attention over paged keys and values",
    suite=f"{_S}.attention:AttentionContract",
    capabilities={
        "sliding_window": "honours LayerSpec.window",
        "logit_cap": "honours LayerSpec.logit_cap (soft cap)",
        "sinks": "honours per-head attention sinks",
        "graph": "its metadata lives in fixed buffers, so that a captured graph can be replayed",
        "graph_extend": "`graph` for extend and mixed batches, too, whose number of tokens is fixed",
        "kv_fp8": "reads and writes 8-bit KV, with the pool's scales",
        "latent": "honours LayerSpec.latent: layers whose values are the first numbers of their keys",
        "shared_prefix": "computes attention over ForwardBatch.common_prefix once for all requests",
        "tree_mask": "honours ForwardBatch.tail_bits: tokens that see some of the last keys only, as in a tree",
    },
)

KV_POOL: Contract[KVPool, KVPoolContext] = Contract(
    "kv_pool",
    "memory.pool",
    Cardinality.ONE,
    f"{_I}.kv_pool:KVPool",
    "the device buffers in which keys and values live",
    suite=f"{_S}.kv_pool:KVPoolContract",
    capabilities={"release": "gives its memory back while it is in no use"},
)

TOKEN_ALLOCATOR: Contract[TokenAllocator, TokenAllocatorContext] = Contract(
    "token_allocator",
    "memory.allocator",
    Cardinality.ONE,
    f"{_I}.token_allocator:TokenAllocator",
    "owns the free pages of the KV pool",
    suite=f"{_S}.token_allocator:TokenAllocatorContract",
)

PREFIX_CACHE: Contract[PrefixCache, PrefixCacheContext] = Contract(
    "prefix_cache",
    "prefix_cache",
    Cardinality.ONE,
    f"{_I}.prefix_cache:PrefixCache",
    "finds, locks, keeps and evicts the KV of shared prefixes",
    suite=f"{_S}.prefix_cache:PrefixCacheContract",
    capabilities={
        "reuse": "a prefix inserted once is found again (all but the null cache)",
        "host_tier": "keeps prefixes beyond the device too, promises them, and has them loaded",
        "prefetch": "brings what it keeps far away nearer before it is wanted",
    },
)

SCHEDULE_POLICY: Contract[SchedulePolicy, SchedulePolicyContext] = Contract(
    "schedule_policy",
    "scheduler.policy",
    Cardinality.ONE,
    f"{_I}.schedule_policy:SchedulePolicy",
    "orders the waiting queue and picks victims for retraction",
    suite=f"{_S}.schedule_policy:SchedulePolicyContract",
    capabilities={
        "cache_aware": "reads the prefix cache to order the queue",
        "preempts": "may let a waiting request push out running ones",
        "aging": "waiting counts, so that no request is overtaken for ever",
    },
)

ADMISSION_GATE: Contract[AdmissionGate, AdmissionGateContext] = Contract(
    "admission_gate",
    "gates",
    Cardinality.MANY,
    f"{_I}.admission_gate:AdmissionGate",
    "holds a request back until something is ready, or keeps a finished one's KV for a while",
    suite=f"{_S}.admission_gate:AdmissionGateContract",
    capabilities={
        "holds": "may keep a finished request's KV until it says so",
        "brings_kv": "brings KV of requests that it blocks; the last gate in the list",
    },
)

LOGITS_PROCESSOR: Contract[LogitsProcessor, LogitsProcessorContext] = Contract(
    "logits_processor",
    "logits_processors",
    Cardinality.MANY,
    f"{_I}.logits_processor:LogitsProcessor",
    "changes a batch's logits before sampling, vectorised",
    suite=f"{_S}.logits_processor:LogitsProcessorContract",
    capabilities={
        "params": "requests may name it, with parameters of their own",
        "tokens_ahead": "reads SamplingRow.ahead_ids, so that several tokens of a request can be sampled in one step",
    },
)

SAMPLER: Contract[Sampler, SamplerContext] = Contract(
    "sampler",
    "sampler",
    Cardinality.ONE,
    f"{_I}.sampler:Sampler",
    "turns logits into tokens and logprobs",
    suite=f"{_S}.sampler:SamplerContract",
    capabilities={
        "no_sync": "never waits for its device: the tokens and logprobs that it returns may not be there yet",
        "seeded": "the same seed and logits give the same token in any batch, and logits that rounding moves "
        "seldom another one",
        "params": "requests may bring parameters for it, under its name",
    },
)

API: Contract[ApiRouter, ApiContext] = Contract(
    "api",
    "apis",
    Cardinality.MANY,
    f"{_I}.api_router:ApiRouter",
    "HTTP routes onto the engine client",
    suite=f"{_S}.api_router:ApiRouterContract",
    api_side=True,
)

CONTRACTS: Mapping[str, Contract] = {one.name: one for one in tuple(globals().values()) if isinstance(one, Contract)}
"""Every contract of the core by name. `pegboard plugins list` has them in this order, and plugins' contracts after."""
