"""Fields of SGLang's bodies that this server does not have: what would change the answer, and what would not."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.toolkit.http.refusals import Refusal

Refused = Mapping[str, Refusal]

_BEFORE = {
    **dict.fromkeys(
        (
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "encoder_urls",
            "multi_item_delimiter_indices",
            "need_wait_for_mm_inputs",
            "num_items_assigned",
            "positional_embed_overrides",
        ),
        Refusal(),
    ),
    "lora_id": Refusal("; use lora_path"),
}
"""Other engines that take part, and prompts that are no text and no token ids."""

_MEDIA = dict.fromkeys(
    (
        "image_max_dynamic_patch",
        "images_config",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "use_audio_in_video",
        "video_config",
        "video_max_dynamic_patch",
    ),
    Refusal(),
)

GENERATE: Refused = {
    **_BEFORE,
    **_MEDIA,
    **dict.fromkeys(
        (
            "require_reasoning",
            "return_bytes",
            "return_entropy",
            "return_flat_raw_top_logprobs",
            "return_flat_raw_top_logprobs_b64",
            "return_indexer_topk",
            "return_prompt_token_ids",
            "return_routed_experts",
            "return_sampling_mask",
        ),
        Refusal(),
    ),
    "max_thinking_tokens": Refusal("; /v1/chat/completions has thinking_token_budget"),
}

ENCODE: Refused = {**_BEFORE, **_MEDIA, "return_pooled_hidden_states": Refusal()}

HARMLESS = frozenset(
    {
        *("background", "bootstrap_pair_key", "conversation_id", "custom_labels", "decode_tp_size"),
        *("external_trace_header", "http_worker_ipc", "kv_router_hint", "log_metrics", "mm_content_hashes"),
        *("mm_hashes", "mm_processor_kwargs", "modalities", "no_logs", "received_time"),
        *("routed_experts_start_len", "routing_key"),
        *("session_id", "validation_time"),
    }
)
"""What clients, routers and SGLang itself say about a request, and what only helps to compute the same answer."""

HARMLESS_TO_ENCODE = HARMLESS | {"sampling_params"}

SAMPLING: Refused = {"stop_strs": Refusal("; use stop"), "stop_regex_strs": Refusal("; use stop_regex")}
"""What SGLang's SamplingParams call fields that have other names in a request."""

HARMLESS_TO_SAMPLING = frozenset({"stream_interval", "stop_str_max_len", "stop_regex_max_len", "is_normalized"})
