"""Gates: the admission gates of an engine, and the KV pool as those see it that bring KV."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, KVAccess
from pegboard.core.interfaces.contracts import ADMISSION_GATE
from pegboard.core.interfaces.errors import ConfigError, PluginError, Problem
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.toolkit.cache.kv_identity import described_kv, kept_as, kv_identity

if TYPE_CHECKING:
    from pegboard.core.engine.choose import Chosen, Loaded
    from pegboard.core.pipeline.points import Points

BRINGS_KV = "brings_kv"


def build_gates(chosen: Chosen, loaded: Loaded, points: Points, ctx: AdmissionGateContext) -> GateKeeper | None:
    """Return the gates in their order. Those that stages bring come first.

    Raises ConfigError where a gate that brings KV is not the last, or is beside a speculator that could not know it.
    """
    if any(BRINGS_KV in record.provider.provides for record in chosen.resolved.candidates[ADMISSION_GATE.name]):
        ctx = replace(ctx, kv=kv_access(chosen, loaded))
    gates = stage_gates(points, ctx)
    choices = chosen.selection.choose_all(ADMISSION_GATE, ctx)
    for place, one in enumerate(choices, start=1):
        if BRINGS_KV not in one.provides:
            continue
        if place < len(choices):
            others = ", ".join(other.name for other in choices[place:])
            raise ConfigError(Problem("gates", f"{one.name!r} brings KV, so it comes last; put {others} before it"))
        if chosen.further:
            text = f"{one.name!r} brings KV without what the speculator keeps of it; set speculation.use to none"
            raise ConfigError(Problem("gates", text))
    gates += [(gate.name, chosen.culprits.know(gate.record, gate.build(ctx))) for gate in choices]
    return GateKeeper(gates, time.monotonic) if gates else None


def stage_gates(points: Points, ctx: AdmissionGateContext) -> list[tuple[str, AdmissionGate]]:
    """Return the gates that stages bring, with the stages' names. Raises PluginError for what is none."""
    found: list[tuple[str, AdmissionGate]] = []
    for stage in points.stages:
        gate: object = stage.gate(ctx)
        if isinstance(gate, AdmissionGate):
            points.culprits.know_gate(stage.name, stage, gate)
            found.append((stage.name, gate))
        elif gate is not None:
            who = points.culprits.known(stage) or f"the stage {stage.name!r}"
            raise PluginError(f"{who}: gate() brings {gate!r}, which is not an AdmissionGate")
    return found


def kv_access(chosen: Chosen, loaded: Loaded) -> KVAccess:
    """Return the KV pool as gates see it."""
    layers = chosen.spec.layers + chosen.further
    numerics = loaded.numerics
    kept = kept_as(loaded.memory.pool, chosen.model)
    return KVAccess(
        page_size=chosen.resolved.engine.memory.page_size,
        pool=loaded.memory.pool,
        identity=kv_identity(chosen.model, layers, numerics=numerics, kept=kept),
        described=described_kv(chosen.model, layers, numerics=numerics, kept=kept),
    )
