"""Blocks of KV in files."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="storage_files",
    version="0.1.0",
    summary="blocks of KV in files",
    requires=("kv_tiers",),
    providers=(
        Provider(
            contract="kv_storage",
            name="files",
            factory="pegboard.plugins.storage_files.storage:FilesStorage",
            config="pegboard.plugins.storage_files.options:FilesOptions",
            summary="a file per block in a folder that servers may share; the least recently used goes first",
            provides=frozenset({"persistent", "shared"}),
            rank=10,
        ),
    ),
)
