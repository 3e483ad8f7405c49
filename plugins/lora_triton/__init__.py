"""LoRA adapters in Triton."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="lora_triton",
    version="0.1.0",
    requires=("adapters",),
    summary="computes LoRA adapters in Triton",
    providers=(
        Provider(
            contract="adapters",
            name="triton",
            factory="pegboard.plugins.lora_triton.backend:TritonAdapters",
            summary="two launches per site, whatever adapters a batch has; on a CPU only under Triton's interpreter",
            provides=frozenset({"graph"}),
            rank=15,
        ),
    ),
    extras={"triton": "pip install 'pegboard[triton]'"},
)
