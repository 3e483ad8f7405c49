"""The radix-tree prefix cache."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="cache_radix",
    version="0.1.0",
    summary="prefix cache over a radix tree",
    providers=(
        Provider(
            contract="prefix_cache",
            name="radix",
            factory="pegboard.plugins.cache_radix.cache:RadixCache",
            config="pegboard.plugins.cache_radix.options:RadixOptions",
            summary="a radix tree over token pages, split where sequences diverge",
            provides=frozenset({"reuse"}),
            rank=20,
        ),
    ),
)
