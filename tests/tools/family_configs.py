"""Tiny checkpoints of the families that are tried: by name the prefix of a config class of transformers, and fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCAB = 512


@dataclass(frozen=True)
class Family:
    """`prefix` is that of the config's class, `model` the model's where AutoModelForCausalLM has none. A config that
    does not say how long the context may be needs `context_length`.
    """

    prefix: str
    fields: Mapping[str, Any]
    model: str | None = None
    context_length: int | None = None


_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_BASE, "num_key_value_heads": 2}
_MOE: dict[str, Any] = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_STATES_ALONE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}

FAMILIES: dict[str, Family] = {
    "llama3": Family("Llama", _GROUPED),
    "mistral": Family("Mistral", {**_GROUPED, "sliding_window": 16}),
    "ministral3": Family("Ministral3", _GROUPED),
    "mixtral": Family("Mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Family("Qwen2", _GROUPED),
    "qwen3": Family("Qwen3", {**_GROUPED, "head_dim": 16}),
    "qwen3_moe": Family("Qwen3Moe", {**_MOE, "head_dim": 16}),
    "qwen3_next": Family("Qwen3Next", {**_MOE, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "qwen3_5": Family("Qwen3_5Text", {**_GROUPED, **_DELTA, "head_dim": 16}),
    "qwen3_5_moe": Family("Qwen3_5MoeText", {**_MOE, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "deepseek_v2": Family("DeepseekV2", {**_BASE, **_LATENT}),
    "deepseek_v3": Family("DeepseekV3", {**_BASE, **_LATENT}),
    "deepseek_v32": Family("DeepseekV32", {**_BASE, **_LATENT}),
    "deepseek_v4": Family("DeepseekV4", _BASE),
    "glm4": Family("Glm4", {**_GROUPED, "head_dim": 16}),
    "glm4_moe": Family(
        "Glm4Moe",
        {
            **_GROUPED,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe_lite": Family("Glm4MoeLite", {**_BASE, **_LATENT}),
    "glm_moe_dsa": Family("GlmMoeDsa", {**_BASE, **_LATENT}),
    "llama4_text": Family(
        "Llama4Text",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
        },
    ),
    "gemma2": Family("Gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": 16, "layer_types": _ALTERNATING}),
    "gemma3_text": Family(
        "Gemma3Text", {**_GROUPED, "head_dim": 16, "sliding_window": 16, "layer_types": _ALTERNATING}
    ),
    "gemma4_text": Family(
        "Gemma4Text", {**_GROUPED, "head_dim": 16, "sliding_window": 16, "layer_types": _ALTERNATING}
    ),
    "gpt_oss": Family(
        "GptOss",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi3": Family("Phi3", {**_GROUPED, "sliding_window": 16}),
    "phi4_mini": Family("Phi3", {**_GROUPED, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phimoe": Family("Phimoe", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": Family("MiniMaxM2", {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax": Family("MiniMax", {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "kimi_linear": Family(
        "KimiLinear",
        {
            **_GROUPED,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "layer_types": _DELTA["layer_types"],
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "mimo_v2_flash": Family("MiMoV2Flash", {**_GROUPED, "head_dim": 16}),
    "seed_oss": Family("SeedOss", {**_GROUPED, "head_dim": 16}),
    "hunyuan_dense": Family("HunYuanDenseV1", {**_GROUPED, "head_dim": 16}),
    "ernie4_5": Family("Ernie4_5", {**_GROUPED, "head_dim": 16}),
    "ernie4_5_moe": Family(
        "Ernie4_5_Moe",
        {**_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "exaone4": Family("Exaone4", {**_GROUPED, "sliding_window": 16, "layer_types": _ALTERNATING}),
    "olmo3": Family("Olmo3", {**_GROUPED, "sliding_window": 16, "layer_types": _ALTERNATING}),
    "olmoe": Family("Olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": Family("Cohere2", {**_GROUPED, "sliding_window": 16, "layer_types": _ALTERNATING}),
    "granite": Family("Granite", _GROUPED),
    "granite_hybrid": Family(
        "GraniteMoeHybrid",
        {
            **_GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
        },
    ),
    "nemotron_h": Family(
        "NemotronH",
        {**_GROUPED, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    ),
    "falcon_h1": Family(
        "FalconH1", {**_GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    ),
    "bamba": Family(
        "Bamba",
        {
            **_GROUPED,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "attn_layer_indices": [3],
        },
    ),
    "jamba": Family(
        "Jamba",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 3,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba2": Family(
        "Zamba2",
        {
            **_BASE,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        },
    ),
    "olmo_hybrid": Family("OlmoHybrid", {**_GROUPED, **_DELTA, "linear_num_key_heads": 4}),
    "mamba": Family("Mamba", {**_STATES_ALONE, "state_size": 16}, context_length=512),
    "falcon_mamba": Family("FalconMamba", {**_STATES_ALONE, "state_size": 16}, context_length=512),
    "mamba2": Family(
        "Mamba2",
        {**_STATES_ALONE, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
        context_length=512,
    ),
    "lfm2": Family("Lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm2_moe": Family(
        "Lfm2Moe",
        {
            **_GROUPED,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "smollm3": Family("SmolLM3", _GROUPED),
    "gpt2": Family(
        "GPT2",
        {
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "initializer_range": 0.2,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "falcon": Family(
        "Falcon",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.2,
        },
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        {
            "text_config": {
                **_GROUPED,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 64,
            },
            "image_token_id": 260,
            "video_token_id": 261,
            "vision_start_token_id": 262,
            "vision_end_token_id": 263,
        },
        "Qwen3VLForConditionalGeneration",
    ),
    "gemma3_vl": Family(
        "Gemma3",
        {
            "text_config": {**_GROUPED, "head_dim": 16, "sliding_window": 16, "layer_types": _ALTERNATING},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 260,
            "boi_token_index": 262,
            "eoi_token_index": 263,
        },
        "Gemma3ForConditionalGeneration",
    ),
    "mistral3_vl": Family(
        "Mistral3",
        {
            "text_config": {**_GROUPED, "model_type": "mistral", "head_dim": 16},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": 260,
        },
        "Mistral3ForConditionalGeneration",
    ),
    "llava": Family(
        "Llava",
        {
            "text_config": {**_GROUPED, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": 260,
        },
        "LlavaForConditionalGeneration",
    ),
    "internvl": Family(
        "InternVL",
        {
            "text_config": {**_GROUPED, "model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [28, 28],
                "patch_size": [14, 14],
            },
            "image_token_id": 260,
        },
        "InternVLForConditionalGeneration",
    ),
    "llama4_vl": Family(
        "Llama4",
        {
            "text_config": {
                **_GROUPED,
                "head_dim": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 96,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 260,
            "boi_token_index": 262,
            "eoi_token_index": 263,
        },
        "Llama4ForConditionalGeneration",
    ),
    "qwen3_reranker_seqcls": Family(
        "Qwen3", {**_GROUPED, "head_dim": 16, "num_labels": 1}, "Qwen3ForSequenceClassification"
    ),
    "bert_embed": Family(
        "Bert",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "BertModel",
    ),
    "whisper": Family(
        "Whisper",
        {
            "vocab_size": 512,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "pad_token_id": 258,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        "WhisperForConditionalGeneration",
    ),
    "t5": Family(
        "T5",
        {
            "vocab_size": 512,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "T5ForConditionalGeneration",
    ),
}
