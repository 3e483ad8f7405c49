"""Tiny checkpoints of families whose layers keep states in transformers' cache."""

from __future__ import annotations

from typing import Any

from tests.tools.family_parts import BASE, GROUPED, MOE, Family

_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_STATES_ALONE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}

STATE_FAMILIES: dict[str, Family] = {
    "qwen3_next": Family("Qwen3Next", {**MOE, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "qwen3_5": Family("Qwen3_5Text", {**GROUPED, **_DELTA, "head_dim": 16}),
    "qwen3_5_moe": Family("Qwen3_5MoeText", {**MOE, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "kimi_linear": Family(
        "KimiLinear",
        {
            **GROUPED,
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
    "nemotron_h": Family(
        "NemotronH",
        {
            **GROUPED,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_min": 1e-9,  # as for Zamba 2
        },
    ),
    "falcon_h1": Family(
        "FalconH1",
        {
            **GROUPED,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "granite_hybrid": Family(
        "GraniteMoeHybrid",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
        },
    ),
    "lfm2": Family("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm2_moe": Family(
        "Lfm2Moe",
        {
            **GROUPED,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "mamba2": Family(
        "Mamba2",
        {**_STATES_ALONE, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
        context_length=512,
    ),
    "minimax": Family(
        "MiniMax", {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16}
    ),
    "bamba": Family(
        "Bamba",
        {
            **GROUPED,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "attn_layer_indices": [3],
        },
    ),
    "jamba": Family(
        "Jamba",
        {
            **GROUPED,
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
            **BASE,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,  # which two layers share
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            # transformers bounds time steps by it in prompts and not in decodes, which then differ by 2e-3 to 4e-3.
            "time_step_min": 1e-9,
        },
    ),
    "olmo_hybrid": Family("OlmoHybrid", {**GROUPED, **_DELTA, "linear_num_key_heads": 4}),
    "mamba": Family("Mamba", {**_STATES_ALONE, "state_size": 16}, context_length=512),
    "falcon_mamba": Family("FalconMamba", {**_STATES_ALONE, "state_size": 16}, context_length=512),
}
