"""Speculative decoding: tokens that are proposed cheaply and verified several at a time; and the contract for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.speculation.api import Speculator, SpeculatorContext

SPECULATOR: Contract[Speculator, SpeculatorContext] = Contract(
    "speculator",
    "speculation",
    Cardinality.ONE,
    "pegboard.plugins.speculation.api:Speculator",
    "proposes tokens that the model then verifies, several in one pass",
    suite="pegboard.plugins.speculation.suite:SpeculatorContract",
    capabilities={
        "branches": "proposes trees, not only chains",
        "device": "is a DeviceSpeculator: drafts where the model runs, from the model's own states",
        "judges": "decides from the logits which drafts stand: tokens differ from those without speculation",
    },
    section="pegboard.plugins.speculation.options:SpeculationSection",
    default="none",
)

plugin = Plugin(
    name="speculation",
    version="0.1.0",
    other_servers="pegboard.plugins.speculation:other_servers.yaml",
    summary="speculative decoding: asks a speculator for drafts, and decides how many of them pay",
    contracts=(SPECULATOR,),
    hooks=("pegboard.plugins.speculation.hooks:SpeculationHooks",),
)
