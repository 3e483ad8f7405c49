"""The sampler in one Triton kernel."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="sampler_triton",
    version="0.1.0",
    summary="sampling in one Triton kernel, without waiting for the device",
    providers=(
        Provider(
            contract="sampler",
            name="triton",
            factory="pegboard.plugins.sampler_triton.sampler:TritonSampler",
            config="pegboard.plugins.sampler_triton.options:TritonSamplerOptions",
            summary="temperature, top-k, top-p and min-p in one launch; on a CPU only under Triton's interpreter",
            provides=frozenset({"no_sync", "seeded"}),
            rank=15,
        ),
    ),
    extras={"triton": "pip install 'pegboard[triton]'"},
)
