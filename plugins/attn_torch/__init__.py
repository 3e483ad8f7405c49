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
            provides=frozenset({"kv_fp8", "latent", "sliding_window", "logit_cap", "sinks", "tree_mask"}),
            rank=10,
        ),
    ),
)
