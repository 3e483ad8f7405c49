"""The sampler in plain torch."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="sampler_torch",
    version="0.1.0",
    summary="sampling in plain torch",
    providers=(
        Provider(
            contract="sampler",
            name="torch",
            factory="pegboard.plugins.sampler_torch.sampler:TorchSampler",
            summary="temperature, top-k, top-p and min-p in plain torch",
            provides=frozenset({"seeded"}),
            rank=10,
        ),
    ),
)
