"""What an engine gives to gates that bring KV, and when it refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.engine.gates import stage_gates
from pegboard.core.interfaces.admission_gate import AdmissionGateContext, KVAccess
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Stage
from pegboard.core.pipeline.points import Points
from pegboard.plugins.gate_session.gate import SessionGate
from pegboard.plugins.gate_session.options import SessionGateOptions
from pegboard.toolkit.system.culprits import Culprits
from pegboard_drills.gate import DrillGate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def config(model: Path, *gates: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu", "context_length": 256},
        "memory": {"max_total_tokens": 1024, "page_size": 16},
        "log_level": "error",
        "gates": list(gates),
        **more,
    }


def test_what_a_gate_works_with(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool as it lies, what its KV depends on, and the stage that it works with."""
    seen: list[AdmissionGateContext] = []
    closed: list[DrillGate] = []
    start = DrillGate.__init__

    def watched(self: DrillGate, options: Any, ctx: AdmissionGateContext) -> None:
        seen.append(ctx)
        start(self, options, ctx)

    monkeypatch.setattr(DrillGate, "__init__", watched)
    monkeypatch.setattr(DrillGate, "close", lambda self: closed.append(self))
    with Engine.from_config(config(model, "drill")) as engine:
        (kv,) = [ctx.kv for ctx in seen]
        assert isinstance(kv, KVAccess)
        assert kv.pool is engine.built.pool
        assert (kv.page_size, len(kv.identity), kv.described["dtype"]) == (16, 32, "torch.float32")
        assert [ctx.stages.keys() >= {"kv_handoff"} for ctx in seen] == [True]
    assert len(closed) == 1


def test_other_gates_have_nothing_to_do_with_the_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AdmissionGateContext] = []
    start = SessionGate.__init__

    def watched(self: SessionGate, options: Any, ctx: AdmissionGateContext) -> None:
        seen.append(ctx)
        start(self, options, ctx)

    monkeypatch.setattr(SessionGate, "__init__", watched)
    with Engine.from_config(config(model, "session")):
        assert [ctx.kv for ctx in seen] == [None]


def test_a_gate_that_brings_kv_needs_the_plugin(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_handoff"):
        Engine.from_config(config(model, "drill", plugins={"kv_handoff": False}))


def test_the_gate_that_brings_kv_comes_last(model: Path) -> None:
    with pytest.raises(ConfigError, match="'drill' brings KV, so it comes last; put session before it"):
        Engine.from_config(config(model, "drill", "session"))


def test_a_gate_that_raises_where_it_is_told_of_kv_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DrillGate, req: Req, slots: object) -> None:
        raise RuntimeError("no place for it")

    monkeypatch.setattr(DrillGate, "computed", broken)
    with Engine.from_config(config(model, "drill")) as engine:
        answer = engine.generate("a", {"max_new_tokens": 4}, params={"drill": {}})
        assert answer.finish_reason is not None
        assert answer.finish_reason["message"] == "the gate 'drill' failed: RuntimeError: no place for it"
        assert engine.stats()["plugin_failures_by"] == {"admission_gate": {"drill": 1}}


def test_a_gate_of_a_stage_is_counted_under_the_name_of_the_stage() -> None:
    class Gated(Stage):
        name = "gated"

        def gate(self, ctx: AdmissionGateContext) -> SessionGate:
            return SessionGate(SessionGateOptions(), ctx)

    stage, culprits = Gated(), Culprits()
    culprits.know_part("stage", stage.name, "mine 1.0", stage)
    ((name, gate),) = stage_gates(Points([stage], culprits), AdmissionGateContext(ManualClock()))
    culprits.count(culprits.known(gate))
    assert name == "gated"
    assert culprits.all_counts() == {"admission_gate": {"gated": 1}}
    assert str(culprits.known(gate)) == "the admission gate 'gated' (mine 1.0)"


def test_readers_do_not_give_up_what_a_gate_holds(model: Path) -> None:
    """An answer that was read to its end is over; one that was not is aborted, and then nothing is held."""
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with Engine.from_config(config(model, {"use": "drill", "hold": 60.0})) as engine:
        engine.generate([[3, 4, 5]], sampling)
        assert engine.stats()["held_requests"] == 1
        list(engine.stream([3, 4, 5], sampling))
        assert engine.stats()["held_requests"] == 2
        engine.submit(GenerateRequest(prompt=[3, 4, 5], sampling=sampling))
        while not any(chunk.finish_reason for chunk in engine.poll()):
            pass
        assert engine.stats()["held_requests"] == 3
        left = engine.submit(GenerateRequest(prompt=[3, 4, 5], sampling=sampling))
        engine.poll()
        engine.abort(left)
        assert engine.stats()["held_requests"] == 3
