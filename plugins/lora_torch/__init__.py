"""LoRA adapters in torch, on any device."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="lora_torch",
    version="0.1.0",
    requires=("adapters",),
    summary="computes LoRA adapters in torch",
    providers=(
        Provider(
            contract="adapters",
            name="torch",
            factory="pegboard.plugins.lora_torch.backend:TorchAdapters",
            summary="two products per site and adapter of a batch, on any device",
            rank=10,
        ),
    ),
)
