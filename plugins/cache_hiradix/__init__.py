"""The radix-tree prefix cache with a tier on the host, and storages behind it."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="cache_hiradix",
    version="0.1.0",
    summary="prefix cache over a radix tree, with tiers on the host and in storages",
    requires=("kv_tiers",),
    providers=(
        Provider(
            contract="prefix_cache",
            name="hiradix",
            factory="pegboard.plugins.cache_hiradix.cache:HiRadixCache",
            config="pegboard.plugins.cache_hiradix.options:HiRadixOptions",
            summary="a radix tree whose pages have copies on the host and in storages",
            provides=frozenset({"reuse", "host_tier", "prefetch"}),
            rank=15,
            conformance="pegboard.plugins.cache_hiradix.suite:HiRadixConformance",
        ),
    ),
)
