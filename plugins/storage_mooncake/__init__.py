"""Blocks of KV in Mooncake Store."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="storage_mooncake",
    version="0.1.0",
    summary="blocks of KV in Mooncake Store",
    requires=("kv_tiers",),
    providers=(
        Provider(
            contract="kv_storage",
            name="mooncake",
            factory="pegboard.plugins.storage_mooncake.storage:MooncakeStorage",
            config="pegboard.plugins.storage_mooncake.options:MooncakeOptions",
            summary="an object per block in the memory that servers lend to one Mooncake Store",
            provides=frozenset({"persistent", "shared"}),
            rank=-1,
        ),
    ),
    extras={"mooncake": "pip install 'pegboard[mooncake]'"},
)
