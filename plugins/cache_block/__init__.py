"""The hash-chained block prefix cache."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="cache_block",
    version="0.1.0",
    summary="prefix cache over hash-chained blocks",
    providers=(
        Provider(
            contract="prefix_cache",
            name="block",
            factory="pegboard.plugins.cache_block.cache:BlockCache",
            summary="full blocks in a hash chain, reference counts, an LRU list of free blocks",
            provides=frozenset({"reuse"}),
            rank=10,
        ),
    ),
)
