"""Attention in plain torch, on any device: the reference for the other backends and the default on a CPU."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="attn_torch",
    version="0.1.0",
    summary="attention in plain torch, on any device",
    providers=(
        Provider(
            contract="attention",
            name="torch",
            factory="pegboard.plugins.attn_torch.backend:TorchAttention",
            summary="plain torch, on any device",
            provides=frozenset(
                {"chunked_attention", "kv_fp8", "latent", "logit_cap", "sinks", "sliding_window", "tree_mask"}
            ),
            rank=10,
        ),
    ),
)
