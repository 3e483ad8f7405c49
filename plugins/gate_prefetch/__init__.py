"""The gate that gives storages time to bring what they have of a prompt."""

from pegboard.core.interfaces.plugin import Plugin, Provider, Requirement

plugin = Plugin(
    name="gate_prefetch",
    version="0.1.0",
    summary="lets requests wait, for a while, for what storages have of their prompts",
    requires=("kv_tiers",),
    providers=(
        Provider(
            contract="admission_gate",
            name="prefetch",
            factory="pegboard.plugins.gate_prefetch.gate:PrefetchGate",
            config="pegboard.plugins.gate_prefetch.options:PrefetchGateOptions",
            summary="what storages have of a prompt comes to the host before it is computed",
            requires=(Requirement("prefix_cache", "prefetch", "it asks the cache what storages have"),),
        ),
    ),
)
