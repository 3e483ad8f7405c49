"""Attention in FlashInfer's kernels: a plan per batch and kind of layer, made on the host."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="attn_flashinfer",
    version="0.1.0",
    summary="attention in FlashInfer's kernels",
    providers=(
        Provider(
            contract="attention",
            name="flashinfer",
            factory="pegboard.plugins.attn_flashinfer.backend:FlashInferAttention",
            summary="FlashInfer's kernels, on NVIDIA GPUs",
            config="pegboard.plugins.attn_flashinfer.options:FlashInferOptions",
            provides=frozenset(
                {"sliding_window", "logit_cap", "sinks", "tree_mask", "graph", "kv_fp8", "shared_prefix"}
            ),
            rank=15,
        ),
    ),
    extras={"flashinfer": "pip install 'pegboard[flashinfer]'"},
)
