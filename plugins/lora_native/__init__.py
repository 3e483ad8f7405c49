"""LoRA adapters in the native runner's C++ code."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="lora_native",
    version="0.1.0",
    requires=("adapters", "cpu_native"),
    summary="computes LoRA adapters in the native runner",
    providers=(
        Provider(
            contract="adapters",
            name="cpu_native",
            factory="pegboard.plugins.lora_native.backend:NativeAdapters",
            summary="the native runner's own, in C++: added to each block of a product while it is in the cache",
            rank=20,
        ),
    ),
)
