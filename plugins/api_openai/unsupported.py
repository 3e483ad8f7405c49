"""Fields of OpenAI's, vLLM's and SGLang's that would change an answer and that this server does not have, by route."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.toolkit.http.media_fields import COMMON
from pegboard.toolkit.http.refusals import Refusal

Refused = Mapping[str, Refusal]


def _plain(*names: str) -> dict[str, Refusal]:
    return dict.fromkeys(names, Refusal())


_REMOTE: Refused = _plain(
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "ec_transfer_params",
    "kv_transfer_params",
    "routed_dp_rank",
)
"""Other engines that take part."""

_MEDIA: Refused = {
    **_plain(
        "images_config",
        "max_dynamic_patch",
        "media_io_kwargs",
        "min_dynamic_patch",
        "mm_processor_kwargs",
        "return_mm_kwargs",
        "use_audio_in_video",
        "video_config",
    ),
    "mm_payload": Refusal(neutral=("tensors",)),
}

_OTHER_OUTPUT: Refused = {
    **_plain(
        "return_cached_tokens_details",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
        "return_meta_info",
        "return_prompt_text",
        "return_routed_experts",
        "return_sampling_mask",
        "return_spec_tokens_details",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "return_weight_versions",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
        "sampling_logprobs_mode",
    ),
    **dict.fromkeys(
        ("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_prompt_token_ids"),
        Refusal("; use return_token_ids"),
    ),
    "logprob_token_ids": Refusal("; /generate has token_ids_logprob"),
}
"""What an answer would have beside its text."""

_OTHER_DECODING: Refused = {
    **_plain(
        "repetition_detection",
        "use_beam_search",
        "vllm_xargs",
        "watermark",
        "watermarking",
    ),
    "early_stopping": Refusal(": it is of beam search"),
    "length_penalty": Refusal(": it is of beam search", neutral=(1.0,)),
    "guided_whitespace_pattern": Refusal("; a grammar says where spaces stand"),
}

_TRUNCATION: Refused = {
    # -1 is as many as the model takes.
    "truncate_prompt_tokens": Refusal(": it leaves nothing of a prompt out", neutral=(-1,)),
}

_GENERATION: Refused = {**_REMOTE, **_MEDIA, **_OTHER_OUTPUT, **_OTHER_DECODING, **_TRUNCATION}

CHAT: Refused = {
    **_GENERATION,
    **_plain("echo", "moderation", "task"),
    "include_reasoning": Refusal("; a client may pass over reasoning_content", neutral=(True,), false_asks=True),
    "input_ids": Refusal("; /v1/completions takes token ids"),
}

COMPLETIONS: Refused = {
    **_GENERATION,
    **_plain("custom_labels", "prompt_embeds"),
    "thinking_token_budget": Refusal("; /v1/chat/completions has it"),
}

RESPONSES: Refused = {
    **_REMOTE,
    **_MEDIA,
    "include_reasoning": Refusal("; a client may pass over reasoning items", neutral=(True,), false_asks=True),
    **_plain("enable_response_messages", "previous_input_messages", "vllm_xargs", "watermarking"),
    "include_stop_str_in_output": Refusal("; use no_stop_trim"),
    **dict.fromkeys(
        (
            "ebnf",
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "regex",
            "response_format",
            "structured_outputs",
        ),
        Refusal("; use text.format"),
    ),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), Refusal("; use custom_logit_processor")),
}

CHAT_WITH_MEDIA: Refused = {name: one for name, one in CHAT.items() if name != COMMON}
RESPONSES_WITH_MEDIA: Refused = {name: one for name, one in RESPONSES.items() if name != COMMON}
"""For models that take media."""

_POOLING: Refused = {
    **_plain("embed_override_token_id", "embed_overrides", "lora_path", "mm_processor_kwargs"),
    **_TRUNCATION,
    "embed_dtype": Refusal("; vectors are float32", neutral=("float32",)),
    "endianness": Refusal("; base64 is little-endian", neutral=("native", "little")),
    "padding": Refusal(neutral=("do_not_pad",)),
    "use_activation": Refusal("; /v1/embeddings has normalize", neutral=(True,), false_asks=True),
}

EMBEDDINGS: Refused = {
    **_POOLING,
    **_plain("late_chunking_params", "media_io_kwargs"),
    **dict.fromkeys(("messages", "chat_template", "chat_template_kwargs"), Refusal("; send a text as input")),
}

_SCORING: Refused = {
    **_POOLING,
    **_plain("chat_template_kwargs", "instruct", "instruction"),
    **dict.fromkeys(("max_tokens_per_doc", "max_tokens_per_query"), Refusal(": it leaves nothing of a text out")),
}

SCORE: Refused = {
    **_SCORING,
    **_plain(
        "item_embed_overrides",
        "query_embed_overrides",
        "return_pooled_hidden_states",
        "return_token_logprobs",
        "score_extraction_token",
    ),
    **dict.fromkeys(("data_1", "data_2", "queries"), Refusal("; use text_1 and text_2")),
    "temperature": Refusal(neutral=(1.0,), false_asks=True),
}

RERANK: Refused = _SCORING
