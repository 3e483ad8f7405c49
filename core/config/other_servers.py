"""What vLLM and SGLang call it: their flags and keys, each with the key that it is here, or with why there is none.

Names that are ours as well but for the section (`port`, `dtype`, `context_length`) are not here: `suggest` finds those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MODEL = "or name it on the command line: pegboard serve MODEL"
_ONE_DEVICE = "a server uses one device"
_ADAPTERS = "adapters (LoRA)"
_BEYOND = "docs/tiers.md"


@dataclass(frozen=True, slots=True)
class Answer:
    """`key` is the dotted path here, "" where there is none; `note` says how it differs, or what to do instead."""

    key: str = ""
    note: str = ""

    def in_config(self) -> str:
        """Return it for a key of a config: ``use memory.gpu_share: ...``."""
        return self._told(f"use {self.key}")

    def as_option(self) -> str:
        """Return it for a flag of the command line: ``use --set memory.gpu_share=...``."""
        return self._told(f"use --set {self.key}=...")

    def _told(self, use: str) -> str:
        return self.note if not self.key else f"{use} ({self.note})" if self.note else use


def _missing(what: str) -> Answer:
    return Answer(note=f"not supported yet: {what} (docs/limits.md)")


_TABLE = (
    ("model model_path model_tag", Answer("model.path", _MODEL)),
    ("served_model_name", Answer("model.served_name")),
    ("max_model_len", Answer("model.context_length")),
    ("revision", Answer("model.source.revision", "with model.source.use=hf")),
    ("download_dir", Answer(note="set HF_HOME in the environment: models of the hub are kept there")),
    ("tokenizer tokenizer_path", _missing("another tokenizer than the one in the model's directory")),
    ("tokenizer_mode skip_tokenizer_init", _missing("another tokenizer than the model's tokenizer.json")),
    ("trust_remote_code", Answer(note="leave it out: the code of a checkpoint is never run")),
    ("generation_config sampling_defaults", Answer("sampling_defaults", "model or none")),
    ("load_format", Answer(note="leave it out: safetensors and GGUF files are told apart by themselves")),
    ("quantization", _missing("quantised checkpoints, such as AWQ, GPTQ and FP8; GGUF files are converted")),
    ("admin_api_key", Answer("server.admin_key")),
    ("ssl_keyfile", Answer("server.tls.key_file")),
    ("ssl_certfile", Answer("server.tls.cert_file")),
    ("ssl_keyfile_password", Answer("server.tls.key_password_file", "a file that holds it")),
    ("ssl_ca_certs", Answer("server.tls.client_ca_file")),
    ("allowed_origins", Answer("server.cors.allow_origins")),
    ("uvicorn_log_level log_level_http", Answer("log_level")),
    ("enable_log_requests disable_log_requests", Answer("log_requests", "off by default")),
    ("enable_metrics disable_log_stats", Answer("apis", "a list; GET /metrics is there by default")),
    ("gpu_memory_utilization mem_fraction_static", Answer("memory.gpu_share", "of what the weights leave free")),
    ("kv_cache_dtype", Answer("memory.kv_dtype")),
    ("block_size", Answer("memory.page_size")),
    ("num_gpu_blocks_override", Answer("memory.max_total_tokens", "in tokens")),
    ("max_num_seqs", Answer("scheduler.max_running_requests")),
    ("max_num_batched_tokens long_prefill_token_threshold", Answer("scheduler.chunked_prefill_size")),
    ("enable_chunked_prefill", Answer("scheduler.chunked_prefill_size", "0 is off")),
    ("enable_mixed_chunk", Answer("scheduler.mixed_chunk")),
    ("schedule_policy scheduling_policy", Answer("scheduler.policy.use")),
    ("schedule_conservativeness", Answer("scheduler.conservativeness")),
    ("async_scheduling disable_overlap_schedule", Answer("scheduler.loop", "overlap or normal")),
    ("random_seed", Answer("scheduler.seed")),
    ("enable_prefix_caching no_enable_prefix_caching disable_radix_cache", Answer("prefix_cache.use")),
    ("enable_hierarchical_cache hicache_ratio hicache_size", Answer("prefix_cache.use", _BEYOND)),
    ("swap_space kv_offloading_size", Answer("memory.host.max_total_tokens", _BEYOND)),
    ("hicache_storage_backend", Answer("memory.storage", _BEYOND)),
    ("kv_transfer_config disaggregation_mode", Answer("gates", "docs/disaggregation.md")),
    ("attention_backend", Answer("attention.use")),
    ("sampling_backend", Answer("sampler.use")),
    ("grammar_backend guided_decoding_backend structured_outputs_config", Answer("grammar.use")),
    ("tool_call_parser enable_auto_tool_choice", Answer("tool_parser.use", "auto by default")),
    ("enable_reasoning", Answer("reasoning_parser.use", "auto by default")),
    ("enforce_eager disable_cuda_graph", Answer("runner.graphs", "off; with runner.use=layered")),
    ("cuda_graph_bs cudagraph_capture_sizes", Answer("runner.graph_sizes", "with runner.use=layered")),
    ("speculative_config speculative_algorithm", Answer("speculation.use", "docs/speculation.md")),
    ("speculative_num_draft_tokens num_speculative_tokens", Answer("speculation.max_nodes")),
    ("limit_mm_per_prompt", Answer("media.max_items")),
    ("allowed_local_media_path", Answer("media.allowed_paths")),
    ("allowed_media_domains", Answer("media.allowed_domains")),
    ("language_model_only", Answer("media.enabled", "false")),
    ("is_embedding task runner_type", Answer(note="leave it out: every model answers /v1/embeddings")),
    ("cpu_offload_gb", _missing("weights in the memory of the host")),
    ("tensor_parallel_size tp_size tp pipeline_parallel_size pp_size pp", _missing(_ONE_DEVICE)),
    ("data_parallel_size dp_size dp enable_expert_parallel expert_parallel_size ep_size ep", _missing(_ONE_DEVICE)),
    ("nnodes node_rank dist_init_addr distributed_executor_backend", _missing(_ONE_DEVICE)),
    ("enable_lora lora_modules lora_paths max_loras max_lora_rank", _missing(_ADAPTERS)),
    ("config", Answer(note="name config files on the command line: pegboard serve FILE.yaml")),
)

ANSWERS: Mapping[str, Answer] = {name: answer for names, answer in _TABLE for name in names.split()}
"""By their names, in small letters and with underscores."""


def plain_name(name: str) -> str:
    """Return a flag or key as the table has it: ``--Max-Model-Len`` as ``max_model_len``."""
    return name.strip().lstrip("-").replace("-", "_").lower()
