"""Names of the fields of requests, by route, as their clients and servers declare them."""

from __future__ import annotations

Fields = dict[str, str]

OPENAI: Fields = {
    "/v1/chat/completions": """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
        messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
        safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
        top_logprobs top_p user verbosity web_search_options
    """,
    "/v1/completions": """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
        stream stream_options suffix temperature top_p user
    """,
    "/v1/responses": """
        background context_management conversation include input instructions max_output_tokens max_tool_calls
        metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
        stream_options temperature text tool_choice tools top_logprobs top_p truncation user
    """,
    "/v1/embeddings": """
        dimensions encoding_format input model user
    """,
}
"""openai-python 2.54.0, `types/**/*_create_params.py`."""

VLLM: Fields = {
    "/v1/chat/completions": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens
        mm_payload mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs
        reasoning_effort repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
        return_weight_versions routed_experts_prompt_start seed session_id skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    """,
    "/v1/completions": """
        add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
        ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds
        prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs suffix temperature
        thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
        watermarking
    """,
    "/v1/responses": """
        background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
        ignore_eos include include_reasoning include_stop_str_in_output input instructions kv_transfer_params
        logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload
        mm_processor_kwargs model parallel_tool_calls presence_penalty previous_input_messages
        previous_response_id priority prompt prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning repetition_penalty request_id return_mm_kwargs safety_identifier seed service_tier session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids store stream structured_outputs
        temperature text tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs watermarking
    """,
    "/v1/embeddings": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs messages
        mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/v1/score": """
        add_special_tokens apply_softmax cache_salt chat_template_kwargs data_1 data_2 documents instruction
        item_first items label_token_ids max_tokens_per_doc max_tokens_per_query mm_processor_kwargs model
        padding priority queries query request_id text_1 text_2 truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/v1/rerank": """
        cache_salt chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query
        mm_processor_kwargs model padding priority query request_id top_n truncate_prompt_tokens truncation_side
        use_activation user
    """,
}
"""vLLM 0.33.0, `ChatCompletionRequest` and so on."""

SGLANG: Fields = {
    "/v1/chat/completions": """
        bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
        custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key
        frequency_penalty ignore_eos images_config input_ids logit_bias logprobs lora_path max_completion_tokens
        max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens mm_processor_kwargs model n
        no_stop_trim parallel_tool_calls presence_penalty priority reasoning_effort regex repetition_penalty
        response_format return_cached_tokens_details return_flat_raw_output_top_logprobs
        return_flat_raw_top_logprobs_b64 return_hidden_states return_input_ids_in_sglext return_meta_info
        return_output_ids_in_sglext return_prompt_token_ids return_routed_experts return_sampling_mask
        return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len
        sampling_logprobs_mode seed separate_reasoning session_id session_params skip_special_tokens stop
        stop_regex stop_token_ids stream stream_options stream_reasoning task temperature thinking tool_choice
        tools top_k top_logprobs top_p use_audio_in_video user video_config watermark
    """,
    "/v1/completions": """
        best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
        custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty ignore_eos
        images_config json_schema logit_bias logprobs lora_path max_tokens min_p min_tokens mm_processor_kwargs
        model n no_stop_trim presence_penalty priority prompt regex repetition_penalty response_format
        return_cached_tokens_details return_hidden_states return_routed_experts return_spec_tokens_details
        return_token_ids rid routed_dp_rank routed_experts_start_len seed session_id session_params
        skip_special_tokens stop stop_regex stop_token_ids stream stream_options suffix temperature top_k top_p
        user watermark
    """,
    "/v1/responses": """
        background bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
        data_parallel_rank disagg_prefill_dp_rank extra_key frequency_penalty include input instructions
        max_output_tokens max_tool_calls metadata min_p model parallel_tool_calls presence_penalty
        previous_response_id priority reasoning repetition_penalty request_id routed_dp_rank service_tier
        session_id stop store stream temperature text tool_choice tools top_k top_logprobs top_p truncation user
    """,
    "/v1/embeddings": """
        dimensions embed_override_token_id embed_overrides encoding_format input lora_path model priority rid
        user
    """,
    "/v1/score": """
        apply_softmax embed_override_token_id item_embed_overrides item_first items label_token_ids model query
        query_embed_overrides return_pooled_hidden_states return_token_logprobs score_extraction_token
        temperature
    """,
    "/v1/rerank": """
        documents instruct query return_documents top_n
    """,
}
"""SGLang 0.5.23, `protocol.py`."""
