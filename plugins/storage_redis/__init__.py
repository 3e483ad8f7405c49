"""Blocks of KV in a server that speaks Redis' protocol."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="storage_redis",
    version="0.1.0",
    summary="blocks of KV behind Redis' protocol",
    requires=("kv_tiers",),
    providers=(
        Provider(
            contract="kv_storage",
            name="redis",
            factory="pegboard.plugins.storage_redis.storage:RedisStorage",
            config="pegboard.plugins.storage_redis.options:RedisOptions",
            summary="a value per block in Redis, Valkey and the like, over TCP, TLS or a Unix socket; they expire",
            provides=frozenset({"persistent", "shared"}),
            rank=-1,
        ),
    ),
    extras={"redis": "pip install 'pegboard[redis]'"},
)
