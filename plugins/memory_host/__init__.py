"""KV on the host, below the device's memory: two layouts of it."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="memory_host",
    version="0.1.0",
    summary="two host pools, for prefix caches with tiers",
    requires=("kv_tiers",),
    providers=(
        Provider(
            contract="host_pool",
            name="layer_first",
            factory="pegboard.plugins.memory_host.pool:LayerFirst",
            summary="one K and one V buffer per layer, as on the device: loads a layer at once",
            rank=20,
        ),
        Provider(
            contract="host_pool",
            name="page_first",
            factory="pegboard.plugins.memory_host.pool:PageFirst",
            summary="page after page with all layers: storages read it in place where a page is a block",
            rank=10,
        ),
    ),
)
