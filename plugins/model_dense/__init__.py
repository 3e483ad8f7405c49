"""Decoders in our own code: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral and the text towers of Qwen-VL."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="model_dense",
    version="0.1.0",
    summary="Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral and the text towers of Qwen-VL in our own code",
    providers=(
        Provider(
            contract="model_family",
            name="dense",
            factory="pegboard.plugins.model_dense.family:DenseFamily",
            config="pegboard.plugins.model_dense.options:DenseOptions",
            summary="Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral and the text of Qwen-VL with fused projections, "
            "from safetensors or GGUF",
            provides=frozenset({"additions", "graph", "kv_scales", "overlay", "ranks", "sections", "taps", "updates"}),
            rank=20,
        ),
    ),
)
