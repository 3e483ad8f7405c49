"""Decoders in our own code: Llama, Mistral, Qwen2, Qwen3 and Qwen-VL's text towers, with fused projections."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="model_dense",
    version="0.1.0",
    summary="Llama, Mistral, Qwen2, Qwen3 and the text towers of Qwen-VL in our own code",
    providers=(
        Provider(
            contract="model_family",
            name="dense",
            factory="pegboard.plugins.model_dense.family:DenseFamily",
            config="pegboard.plugins.model_dense.options:DenseOptions",
            summary="dense decoders (Llama, Mistral, Qwen2, Qwen3, Qwen-VL) with fused projections, from safetensors "
            "or GGUF",
            provides=frozenset({"overlay"}),
            rank=20,
        ),
    ),
)
