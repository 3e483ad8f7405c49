"""The hand-over of KV between servers: what gates that bring it work with, and the contract of what moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.kv_handoff.api import KVTransfer, KVTransferContext

KV_TRANSFER: Contract[KVTransfer, KVTransferContext] = Contract(
    "kv_transfer",
    "kv_transfer",
    Cardinality.ONE,
    "pegboard.plugins.kv_handoff.api:KVTransfer",
    "reads KV out of other servers' memory, for gates that bring it",
    suite="pegboard.plugins.kv_handoff.suite:KVTransferContract",
    capabilities={"fenced": "a lease that ended gives no bytes any more"},
    optional=True,
    section="pegboard.plugins.kv_handoff.options:TransferSection",
)

plugin = Plugin(
    name="kv_handoff",
    version="0.1.0",
    summary="memory for KV that gates bring from other servers, and what moves it",
    contracts=(KV_TRANSFER,),
    hooks=("pegboard.plugins.kv_handoff.hooks:HandoffHooks",),
)
