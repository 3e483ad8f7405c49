"""Tiny random models of many architectures, as checkpoints. Sizes are small and uneven, weights large enough to
matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from pegboard.core.interfaces.model_family import ModelContext

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_LATENT_MOE: dict[str, Any] = {
    **_LATENT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: dict[str, Any] = {
    **_GROUPED,
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 16,
    "layer_types": _ALTERNATING,
}

_LLAMA4: dict[str, Any] = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    # So that temperatures differ within a few tokens, as they do within some thousands of a real one.
    "floor_scale": 4,
    "attn_scale": 0.5,
}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {**_GROUPED, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**_GROUPED, "sliding_window": 16, "layer_types": _ALTERNATING, "logit_scale": 0.5}),
    "axk1": ("AXK1", _LATENT_MOE),
    "deepseek_v2": ("DeepseekV2", {**_LATENT_MOE, "n_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek_v2_lite": ("DeepseekV2", {**_LATENT_MOE, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT_MOE, "n_group": 2, "rope_parameters": _YARN}),
    "exaone4": ("Exaone4", {**_GROUPED, "sliding_window": 16, "layer_types": _ALTERNATING}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", _GEMMA),
    "glm4": ("Glm4", {**_GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2", {**_GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("GPTBigCode", {**_GPT, "multi_query": True}),
    "gpt_neox": ("GPTNeoX", _COMMON),
    "gpt_oss": (
        "GptOss",
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT_MOE),
    "granite": (
        "Granite",
        {**_GROUPED, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.1},
    ),
    "llama": ("Llama", _GROUPED),
    "llama4": ("Llama4Text", _LLAMA4),
    "minicpm3": ("MiniCPM3", _LATENT),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 16}),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", _GROUPED),
    "olmo3": ("Olmo3", {**_GROUPED, "sliding_window": 16, "layer_types": _ALTERNATING}),
    "opt": ("OPT", {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 24, "init_std": 0.2}),
    "phi": ("Phi", _COMMON),
    "phi3": ("Phi3", {**_GROUPED, "sliding_window": 16}),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "smollm3": ("SmolLM3", _GROUPED),
    "starcoder2": ("Starcoder2", {**_GROUPED, "sliding_window": 16}),
    "youtu": ("Youtu", _LATENT),
}
"""Architectures that must be served: the prefix of their config class, and the fields of a tiny one."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": (
        "Bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        "never calls transformers' attention interface",
    ),
    "codegen": ("CodeGen", {**_GPT, "rotary_dim": 4}, "never calls transformers' attention interface"),
    "falcon": (
        "Falcon",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.2,
        },
        "has attention of its own",
    ),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 4}, "has attention of its own"),
    "deepseek_v32": ("DeepseekV32", _LATENT_MOE, "what is not known here (update_indexer)"),
    "recurrent_gemma": (
        "RecurrentGemma",
        {**_GROUPED, "lru_width": 32, "attention_window_size": 16, "head_dim": 8},
        "keeps a state that is not in transformers' cache",
    ),
    "rwkv": (
        "Rwkv",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
        "keeps a state that is not in transformers' cache",
    ),
    "xlstm": (
        "xLSTM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2},
        "what is not known here (rnn_state)",
    ),
}
"""Architectures that must be refused, with a word of the reason."""


def save(directory: Path, prefix: str, fields: dict[str, Any], *, seed: int = 0) -> Path:
    """A random float32 checkpoint in `directory`; biases and norms are random too."""
    config = getattr(transformers, f"{prefix}Config")(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return directory


def context(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> ModelContext:
    """The context of a checkpoint, with fields of its config.json changed."""
    hf_config = {**json.loads((directory / "config.json").read_text("utf-8")), **changes}
    return ModelContext(directory, hf_config, dtype, torch.device("cpu"))
