"""The whole forward pass of a dense decoder in C++, for CPUs."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="cpu_native",
    version="0.1.0",
    summary="dense decoders in C++ on a CPU: bf16 on AMX tiles, AVX-512 or AVX2",
    providers=(
        Provider(
            contract="runner",
            name="cpu_native",
            factory="pegboard.plugins.cpu_native.runner:CpuNativeRunner",
            config="pegboard.plugins.cpu_native.options:CpuNativeOptions",
            summary="the models of `dense` in bf16, experts included, one call per step, with attention of its own",
            provides=frozenset(
                {
                    "additions",
                    "ends",
                    "hidden_states",
                    "input_logprobs",
                    "overlay",
                    "own_attention",
                    "own_weights",
                    "prefers_mixed",
                    "ranks",
                    "taps",
                    "tree_mask",
                    "updates",
                }
            ),
            rank=20,
        ),
        Provider(
            contract="sampler",
            name="cpu_native",
            factory="pegboard.plugins.cpu_native.sampler:CpuNativeSampler",
            config="pegboard.plugins.cpu_native.options:CpuNativeSamplerOptions",
            summary="temperature, top-k, top-p and min-p in C++ on a CPU, without a sort of the vocabulary",
            provides=frozenset({"seeded"}),
            rank=20,
        ),
    ),
)
