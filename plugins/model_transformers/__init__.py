"""object causal language model of transformers whose attention can be replaced, run on our paged KV."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="model_transformers",
    version="0.1.0",
    summary="causal language models of transformers on paged KV",
    providers=(
        Provider(
            contract="model_family",
            name="transformers",
            factory="pegboard.plugins.model_transformers.family:TransformersFamily",
            summary="causal language models through transformers' attention interface, on paged KV",
            provides=frozenset({"additions", "graph", "kv_scales", "taps", "updates"}),
            rank=10,
        ),
    ),
)
