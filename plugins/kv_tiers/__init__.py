"""KV beyond the device, on the host and in storages: what a prefix cache with tiers is lent, and its contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.kv_tiers.api import HostPool, HostPoolContext, KVStorage, KVStorageContext

HOST_POOL: Contract[HostPool, HostPoolContext] = Contract(
    "host_pool",
    "memory.host",
    Cardinality.ONE,
    "pegboard.plugins.kv_tiers.api:HostPool",
    "the host buffers below the device's, for a prefix cache with tiers",
    suite="pegboard.plugins.kv_tiers.suite.host_pool:HostPoolContract",
    optional=True,
    section="pegboard.plugins.kv_tiers.options:HostSection",
)

KV_STORAGE: Contract[KVStorage, KVStorageContext] = Contract(
    "kv_storage",
    "memory.storage",
    Cardinality.MANY,
    "pegboard.plugins.kv_tiers.api:KVStorage",
    "blocks of KV on a disk or behind a network, nearest first, for a prefix cache with tiers",
    suite="pegboard.plugins.kv_tiers.suite.kv_storage:KVStorageContract",
    capabilities={
        "persistent": "what was written is there after a restart",
        "shared": "several servers may use one place at once",
    },
)

plugin = Plugin(
    name="kv_tiers",
    version="0.1.0",
    other_servers="pegboard.plugins.kv_tiers:other_servers.yaml",
    summary="moves KV between the device, the host and storages",
    contracts=(HOST_POOL, KV_STORAGE),
    fields={"memory": "pegboard.plugins.kv_tiers.options:TierFields"},
    hooks=("pegboard.plugins.kv_tiers.hooks:TierHooks",),
)
