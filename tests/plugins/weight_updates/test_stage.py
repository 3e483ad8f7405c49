"""The stage, put to the suite of stages."""

from __future__ import annotations

import pytest

from pegboard.conformance.admission_gate import gated_request
from pegboard.conformance.stage import StageContract
from pegboard.core.interfaces.admission_gate import AdmissionGateContext, KVAccess
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.weight_updates.stage import WeightUpdates


class TestWeightUpdates(StageContract):
    def make_stage(self) -> Stage:
        return WeightUpdates(lambda req, reason: None)

    def feature(self) -> object:
        return None  # it takes part in all requests, and is told nothing of them


class TestWithNewWeights(TestWeightUpdates):
    """After an update: a namespace of its own, and something to tell with each answer."""

    def make_stage(self) -> Stage:
        made = WeightUpdates(lambda req, reason: None)
        made.updated("v2")
        return made


def test_the_gate_names_the_weights() -> None:
    stage = WeightUpdates(lambda req, reason: None)
    gate = stage.gate(AdmissionGateContext())
    req = gated_request()
    assert gate.concerns(req)
    assert gate.enter(req).namespace is None, "those of the start share prefixes with servers without the plugin"
    names = []
    for version in ("a", "b", "a"):
        stage.updated(version)
        names.append(gate.enter(req).namespace)
    assert len({*names, None}) == 4, "a version may come twice, with other weights"


def test_gates_that_bring_kv_are_refused() -> None:
    kv: KVAccess = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="gates: weight_updates do not work with gates that bring KV"):
        WeightUpdates(lambda req, reason: None).gate(AdmissionGateContext(kv=kv))
