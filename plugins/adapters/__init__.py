"""LoRA adapters: their life, the slots that they have on the device, and the contract for what computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.adapters.api import AdapterBackend, AdapterContext

ADAPTERS: Contract[AdapterBackend, AdapterContext] = Contract(
    "adapters",
    "adapters",
    Cardinality.MATCHED,
    "pegboard.plugins.adapters.api:AdapterBackend",
    "computes what LoRA adapters add to the products of linear layers",
    suite="pegboard.plugins.adapters.suite:AdapterContract",
    optional=True,
    capabilities={"graph": "its additions are FixableAdditions: decodes with adapters may be graphs"},
    section="pegboard.plugins.adapters.options:AdapterSection",
)

plugin = Plugin(
    name="adapters",
    version="0.1.0",
    other_servers="pegboard.plugins.adapters:other_servers.yaml",
    summary="LoRA adapters, many at once, loaded and unloaded while requests run",
    contracts=(ADAPTERS,),
    hooks=("pegboard.plugins.adapters.hooks:AdapterHooks",),
)
