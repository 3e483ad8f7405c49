"""Attention in Triton kernels: extend over a cached prefix, and decode split over the KV length."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="attn_triton",
    version="0.1.0",
    summary="attention in Triton kernels",
    providers=(
        Provider(
            contract="attention",
            name="triton",
            factory="pegboard.plugins.attn_triton.backend:TritonAttention",
            summary="Triton kernels; on a CPU only under Triton's interpreter",
            config="pegboard.plugins.attn_triton.options:TritonAttentionOptions",
            provides=frozenset(
                {
                    "chunked_attention",
                    "graph",
                    "graph_extend",
                    "kv_fp8",
                    "latent",
                    "logit_cap",
                    "shared_prefix",
                    "sinks",
                    "sliding_window",
                    "tree_mask",
                }
            ),
            rank=20,
        ),
    ),
    extras={"triton": "pip install 'pegboard[triton]'"},
)
