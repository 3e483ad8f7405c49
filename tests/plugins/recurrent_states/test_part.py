"""The device's half, what the plugin brings for which models, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pegboard.conformance.stage import stage_context
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.ahead import LoadedModel
from pegboard.core.interfaces.errors import ConfigError, OutOfMemory
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.layers import ModelSpec, StateSpec
from pegboard.plugins.adapters.hooks import AdapterHooks
from pegboard.plugins.adapters.options import AdapterSection
from pegboard.plugins.recurrent_states.hooks import StateHooks
from pegboard.plugins.recurrent_states.messages import HowMany, StateWork
from pegboard.plugins.recurrent_states.options import StateOptions
from pegboard.plugins.recurrent_states.part import StatePart
from pegboard.plugins.recurrent_states.slots import Mark, Span
from pegboard.plugins.recurrent_states.stage import rounds_of
from pegboard.plugins.speculation.api import DeviceSpeculator, Speculator
from pegboard.plugins.speculation.checks import check

STATES = (StateSpec("a.conv", (4, 3), "float32"), StateSpec("a.recurrent", (2, 8, 8), "bfloat16"))
EACH = 4 * 4 * 3 + 2 * 2 * 8 * 8
SPEC = ModelSpec("Keeps", 251, 8, 512, (), (), states=STATES)
MODEL = cast(LoadedModel, SimpleNamespace(device=torch.device("cpu")))


def context(spec: ModelSpec = SPEC, loop: str = "normal") -> Any:
    config = SimpleNamespace(
        memory=SimpleNamespace(page_size=4), scheduler=SimpleNamespace(max_running_requests=10, loop=loop)
    )
    return stage_context(config=config, spec=spec)


def test_nothing_for_models_without_states() -> None:
    hooks, plain = StateHooks(StateOptions()), context(replace(SPEC, states=()))
    assert not hooks.pipeline_stages(plain)
    assert not hooks.device_parts(plain)
    [stage], [part] = hooks.pipeline_stages(context()), hooks.device_parts(context())
    assert stage.name == part.name
    assert part.states


@pytest.mark.parametrize(("loop", "slots"), [("normal", 30), ("overlap", 40), ("auto", 40)])
def test_slots_for_all_that_may_run(loop: str, slots: int) -> None:
    [part] = StateHooks(StateOptions()).device_parts(context(loop=loop))
    part.attach(MODEL)
    assert part.run(HowMany(), cast(Any, None)) == slots
    assert part.device_bytes == (slots + 1) * EACH


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, free, error, says in (
        (StateOptions(slots=8), 8 * EACH, ConfigError, r"plugins.recurrent_states.slots: .* lower it to at most 7"),
        (StateOptions(slots=4), 100 * EACH, ConfigError, "must be at least 5"),
        (StateOptions(), 8 * EACH, OutOfMemory, "need room for 5; set plugins.recurrent_states.slots"),
    ):
        monkeypatch.setattr("pegboard.plugins.recurrent_states.part.free_bytes", lambda device, free=free: free)
        with pytest.raises(error, match=says):
            StatePart(STATES, options, 10, 3).attach(MODEL)


def test_a_batch_finds_its_rounds_and_the_memory() -> None:
    part = StatePart(STATES, StateOptions(slots=9), 2, 3)
    part.attach(MODEL)
    spans = [Span(0, 0, [Mark(4, 7, kept=True), Mark(6, 1)]), Span(9, 3, [Mark(10, 2)])]
    batch = cast(ForwardBatch, SimpleNamespace(states=None))
    part.unpack(StateWork(rounds_of(spans)), batch, lambda array: torch.from_numpy(np.ascontiguousarray(array)))
    assert batch.states is not None
    first, second = batch.states.rounds
    assert (first.firsts.tolist(), first.lengths.tolist()) == ([0, 6], [4, 1])
    assert (first.sources.tolist(), first.targets.tolist()) == ([0, 3], [7, 2])
    assert first.fresh is not None
    assert first.fresh.tolist() == [True, False]
    assert (second.firsts.tolist(), second.lengths.tolist(), second.sources.tolist()) == ([4], [2], [7])
    assert second.targets.tolist() == [1]
    assert second.fresh is None
    assert batch.states.memory is part.state_memory
    assert {name: tuple(one.shape) for name, one in batch.states.memory.items()} == {
        "a.conv": (10, 4, 3),
        "a.recurrent": (10, 2, 8, 8),
    }


def test_what_does_not_work_with_states_is_refused() -> None:
    [stage] = StateHooks(StateOptions()).pipeline_stages(context())
    with pytest.raises(ConfigError, match="keeps states takes no KV from elsewhere"):
        stage.gate(cast(AdmissionGateContext, SimpleNamespace(kv=object())))
    adapters = AdapterHooks()
    adapters.configure(cast(Any, SimpleNamespace(adapters=AdapterSection(directories=("/",)))))
    with pytest.raises(ConfigError, match="adapters: Keeps keeps states"):
        adapters.pipeline_stages(context())


@pytest.mark.parametrize(
    ("speculator", "provides", "works"),
    [(Speculator, {"judges"}, True), (Speculator, {"branches"}, False), (DeviceSpeculator, {"device"}, False)],
)
def test_only_chains_that_are_drafted_on_the_host_go_with_states(
    speculator: type[Speculator], provides: set[str], works: bool
) -> None:
    made: Any = type(
        "Made", (speculator,), {"max_nodes": 4, "propose": None, "load": None, "observe": None, "draft": None}
    )
    able = SimpleNamespace(name="able", provides=frozenset({"ends", "taps", "tree_mask"}))
    own = SimpleNamespace(name="own", provides=frozenset(provides))
    choices: Any = {"speculator": [own], "runner": [able], "attention": [able], "model_family": [able]}
    if works:
        check(made(None, None), choices, SPEC)
        return
    with pytest.raises(ConfigError, match=r"speculation.use: 'own' does not draft for Keeps, whose layers keep states"):
        check(made(None, None), choices, SPEC)
    check(made(None, None), choices, replace(SPEC, states=()))
