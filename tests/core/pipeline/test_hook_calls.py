"""Every hook is called when its specification says: by a real engine on a tiny model, and by a real server."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.ahead import KVLayers, KVLayersContext
from pegboard.core.interfaces.batch import BatchExtras, ScheduleBatch
from pegboard.core.interfaces.choosing import MemoryContext
from pegboard.core.interfaces.client import GenerateRequest, ModelInfo, OutputChunk
from pegboard.core.interfaces.errors import ConfigError, ModelError, PluginError
from pegboard.core.interfaces.executor import Executor
from pegboard.core.interfaces.followers import Followers, FollowersContext
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.core.interfaces.hooks import POINTS, hookimpl
from pegboard.core.interfaces.http_front import HttpGuard
from pegboard.core.interfaces.messages import AbortRequest, TokenizedBatch, TokenizedRequest
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.interfaces.req import NO_ROW, Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import (
    DevicePart,
    Interest,
    Sent,
    Stage,
    StageContext,
    StepResult,
    StepView,
)
from pegboard.core.registry.hooks import Hooks
from pegboard.core.registry.registry import Registry
from pegboard.core.server.serve import build_api
from pegboard.toolkit.http.model_names import ModelNames
from tests.core.frontend.test_intake import INFO


@dataclass
class Event:
    """One call. `facts` is what was true at that time, because requests and batches change afterwards."""

    hook: str
    facts: dict[str, Any] = field(default_factory=dict)


EVENTS: list[Event] = []


class Recorder:
    """Implements every hook of the scheduler's process and writes down each call."""

    @hookimpl
    def configure(self, config: Any) -> None:
        EVENTS.append(Event("configure", {"config": config}))

    @hookimpl
    def engine_started(self, info: Any) -> None:
        EVENTS.append(Event("engine_started", {"info": info}))

    @hookimpl
    def idle(self) -> None:
        EVENTS.append(Event("idle"))

    @hookimpl
    def shutdown(self) -> None:
        EVENTS.append(Event("shutdown"))

    @hookimpl
    def batch_scheduled(self, batch: ScheduleBatch) -> None:
        facts = {
            "reqs": [req.rid for req in batch.reqs],
            "tokens": batch.num_tokens,
            "room": all(req.kv.allocated_len >= n for req, n in zip(batch.reqs, batch.seq_lens, strict=True)),
            "output_lens": {req.rid: req.output_len for req in batch.reqs},
        }
        EVENTS.append(Event("batch_scheduled", facts))

    @hookimpl
    def before_forward(self, batch: ForwardBatch) -> None:
        EVENTS.append(Event("before_forward", {"batch": batch, "tokens": batch.input_ids.shape[0]}))

    @hookimpl
    def after_forward(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        EVENTS.append(Event("after_forward", {"batch": batch, "sampled": output.next_token_ids.shape[0]}))

    @hookimpl
    def batch_committed(self, batch: ScheduleBatch) -> None:
        facts = {
            "output_lens": {req.rid: req.output_len for req in batch.reqs},
            "finished": {req.rid for req in batch.reqs if req.finished},
        }
        EVENTS.append(Event("batch_committed", facts))

    @hookimpl
    def requests_finished(self, reqs: Sequence[Req]) -> None:
        held = all(req.kv.row != NO_ROW and req.kv.allocated_len > 0 for req in reqs)
        EVENTS.append(Event("requests_finished", {"reqs": [req.rid for req in reqs], "held": held}))


class MiscountingStage(Stage):
    """Brings an entry too many for a batch with a long prompt in it, and the place of each token."""

    name = "acme"

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest()

    def pack(self, step: StepView, extras: BatchExtras) -> None:
        batch = step.batch
        extras.per_token("acme.place", np.arange(batch.num_tokens))
        extras.per_request("acme.slot", np.zeros(len(batch) + bool((batch.seq_lens > 8).any())))


class Miscounting:
    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        return [MiscountingStage()]


ASKS: dict[str, object] = {"double": {}}


class DoublingFrontend(FrontendStage):
    name = "double"

    def prepare(self, request: Any, length: int, info: ModelInfo) -> object | None:
        return request.params.get("double")

    def finish(self, chunk: OutputChunk, whole: msgspec.Raw | None, rows: Sequence[msgspec.Raw]) -> None:
        chunk.extra = {"double": [msgspec.msgpack.decode(row) for row in rows]}


class DoublingStage(Stage):
    """Twice each token, computed where batches run."""

    name = "double"

    def __init__(self) -> None:
        self.doubles: dict[str, list[int]] = {}

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        if self.name not in message.features:
            return None
        self.doubles[req.rid] = []
        return Interest(single=True)

    def gone(self, req: Req) -> None:
        del self.doubles[req.rid]

    def pack(self, step: StepView, extras: BatchExtras) -> object:
        return [req.rid for req in step.sampled]

    def arrived(self, step: StepView, result: StepResult) -> None:
        for req, double in zip(step.sampled, result.parts[self.name]["doubles"].tolist(), strict=True):
            if req.rid in self.doubles:
                self.doubles[req.rid].append(double)

    def send(self, req: Req, start: int, stop: int) -> Sent:
        return Sent(rows=self.doubles[req.rid][start:stop])


class DoublingPart(DevicePart):
    name = "double"

    def computed(self, payload: object, batch: ForwardBatch, output: ForwardOutput) -> dict[str, torch.Tensor]:
        assert isinstance(payload, list)
        return {"doubles": output.next_token_ids * 2}


class Doubling:
    @hookimpl
    def frontend_stages(self) -> list[FrontendStage]:
        return [DoublingFrontend()]

    @hookimpl
    def pipeline_stages(self) -> list[Stage]:
        return [DoublingStage()]

    @hookimpl
    def device_parts(self) -> list[DevicePart]:
        return [DoublingPart()]


class Reserving:
    @hookimpl
    def kv_layers(self, ctx: KVLayersContext) -> KVLayers:
        number = 1 + max(layer.layer_id for layer in ctx.spec.layers)
        return KVLayers(layers=(replace(ctx.spec.layers[0], layer_id=number),))


class Refusing:
    @hookimpl
    def configure(self, config: Any) -> None:
        EVENTS.append(Event("configure"))
        raise ConfigError("server.port: not on a Sunday")


class Lending:
    @hookimpl
    def memory_services(self, ctx: MemoryContext) -> dict[str, object]:
        EVENTS.append(Event("memory_services", {"ctx": ctx}))
        if ctx.config.memory.page_size == 2:
            raise ConfigError("memory.page_size: too small to lend anything")
        if ctx.config.memory.page_size == 4:
            raise KeyError("acme")
        return {"acme": EVENTS}


class Modelling:
    @hookimpl
    def model_services(self, model: ModelContext) -> dict[str, object]:
        EVENTS.append(Event("model_services", {"model": model}))
        return {"acme": EVENTS}

    @hookimpl
    def kv_layers(self, ctx: KVLayersContext) -> None:
        EVENTS.append(Event("kv_layers", {"services": ctx.model.services}))


ROOM = 50
"""Pages of KV that followers have room for: fewer than the engine itself."""


FOLLOWING = ("followers", "start", "room", "lead")


class Led(Followers):
    """Followers that are not there: batches run here alone."""

    def start(self) -> None:
        EVENTS.append(Event("start"))

    def room(self) -> int:
        EVENTS.append(Event("room"))
        return ROOM

    def lead(self, local: Executor, num_pages: int, table: tuple[int, int]) -> Executor:
        EVENTS.append(Event("lead", {"pages": num_pages, "table": table}))
        return local

    def close(self) -> None:
        EVENTS.append(Event("end"))


class Leading:
    @hookimpl
    def followers(self, ctx: FollowersContext) -> Followers:
        EVENTS.append(Event("followers", {"ctx": ctx}))
        return Led()


class LeadingToo(Leading):
    """Another plugin's."""


class LeadingNothing:
    @hookimpl
    def followers(self) -> Any:
        return 3


class Leaden:
    @hookimpl
    def model_services(self) -> None:
        raise ModelError("weights of lead")


class First:
    @hookimpl
    def batch_scheduled(self) -> None:
        EVENTS.append(Event("first"))


class Second:
    @hookimpl
    def batch_scheduled(self) -> None:
        EVENTS.append(Event("second"))


class AllOfThem:
    """For hooks that a process of this repository calls elsewhere, or not yet."""

    @hookimpl
    def register_metrics(self, registry: Any) -> None:
        EVENTS.append(Event("register_metrics", {"registry": registry}))

    @hookimpl
    def api_services(self, chooser: Any) -> dict[str, object]:
        EVENTS.append(Event("api_services", {"chooser": chooser}))
        return {"events": EVENTS}

    @hookimpl
    def register_routes(self, app: Any) -> None:
        EVENTS.append(Event("register_routes", {"app": app}))


class Guarding:
    def __init__(self, guard: HttpGuard | None) -> None:
        self._guard = guard

    @hookimpl
    def guard_http(self) -> HttpGuard | None:
        return self._guard


@pytest.fixture(autouse=True)
def _forget() -> None:
    EVENTS.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=1)


def start(checkpoint: Path, *hooks: type, **data: Any) -> Engine:
    """An engine with one more plugin per hook class, in this order."""
    plugins = [Plugin(f"recorder{n}", "1", hooks=(f"{__name__}:{one.__name__}",)) for n, one in enumerate(hooks)]
    registry = Registry.discover().with_plugins(*plugins, distribution="test-hooks")
    config = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 1024},
        "plugins": {plugin.name: True for plugin in plugins},
        **data,
    }
    return Engine(compose(data=config, env={}, registry=registry))


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with start(checkpoint, Recorder) as engine:
        yield engine


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)


def calls(*names: str) -> list[Event]:
    return [event for event in EVENTS if event.hook in names]


def step_calls() -> list[str]:
    return [event.hook for event in calls(*(point.name for point in POINTS if point.step))]


class TestLifeCycle:
    def test_configure_comes_first_and_once(self, engine: Engine) -> None:
        assert [event.hook for event in EVENTS] == ["configure", "engine_started"]
        config = EVENTS[0].facts["config"]
        assert config is engine.resolved.engine
        assert config.apis == (), "nothing is counted for a page that is not there"
        with pytest.raises(ValueError, match="frozen"):
            config.server.port = 1

    def test_configure_can_stop_the_start(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match="not on a Sunday"):
            start(checkpoint, Refusing, Recorder)
        assert "engine_started" not in [event.hook for event in EVENTS]

    def test_model_services_before_the_family_is_chosen(self, checkpoint: Path) -> None:
        with start(checkpoint, Modelling):
            first, second = calls("model_services", "kv_layers")
        assert first.facts["model"].architecture == "LlamaForCausalLM"
        assert first.facts["model"].services == {}
        assert second.facts["services"] == {"acme": EVENTS}, "the model has them from then on"

    def test_model_services_can_stop_the_start(self, checkpoint: Path) -> None:
        with pytest.raises(ModelError, match="weights of lead"):
            start(checkpoint, Leaden)

    def test_memory_services_once_memory_is_sized(self, checkpoint: Path) -> None:
        with start(checkpoint, Recorder, Lending):
            (event,) = calls("memory_services")
            assert EVENTS.index(event) < EVENTS.index(calls("engine_started")[0])
        ctx = event.facts["ctx"]
        assert (ctx.cache, ctx.provides, ctx.num_pages, len(ctx.layers)) == ("radix", {"reuse"}, 1024, 1)
        assert "memory.max_total_tokens" in ctx.said
        assert "prefix_cache.use" not in ctx.said, "a preset says it"
        assert len(ctx.identity()) == 32
        assert ctx.requiring("admission_gate", "prefix_cache", "prefetch") == ([], ["prefetch"])

    def test_memory_services_can_stop_the_start(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match="too small to lend"):
            start(checkpoint, Recorder, Lending, memory={"max_total_tokens": 1024, "page_size": 2})
        with pytest.raises(PluginError, match=r"memory_services of plugin 'recorder1' .* raised: KeyError: 'acme'"):
            start(checkpoint, Recorder, Lending, memory={"max_total_tokens": 1024, "page_size": 4})
        assert not calls("engine_started")

    def test_engine_started_with_the_model_loaded(self, engine: Engine) -> None:
        (event,) = calls("engine_started")
        assert isinstance(event.facts["info"], ModelInfo)
        assert event.facts["info"].architecture == "LlamaForCausalLM"
        assert not calls("batch_scheduled"), "no request has run yet"

    def test_idle_each_time_the_work_runs_out(self, engine: Engine) -> None:
        for round_ in (1, 2):
            engine.generate([[3, 4, 5], [6, 7]], greedy(3))
            assert EVENTS[-1].hook == "idle"
            for _ in range(3):
                engine.built.scheduler.step()
            assert len(calls("idle")) == round_, "an engine that stays idle does not say so again"

    def test_shutdown_once(self, checkpoint: Path) -> None:
        engine = start(checkpoint, Recorder)
        engine.close()
        engine.close()
        assert len(calls("shutdown")) == 1
        assert EVENTS[-1].hook == "shutdown"

    @pytest.mark.parametrize(("hook", "argument"), [("register_metrics", "registry"), ("register_routes", "app")])
    def test_register_metrics_and_register_routes_reach_every_plugin(self, hook: str, argument: str) -> None:
        """Who calls them: the API process (below) and, once there are any, whoever keeps metrics."""
        plugins = [Plugin(f"all{n}", "1", hooks=(f"{__name__}:AllOfThem",)) for n in range(2)]
        given = {argument: "it", **({"client": None} if hook == "register_routes" else {})}
        getattr(Hooks.load(Registry.of(*plugins)).call, hook)(**given)
        assert [(event.hook, event.facts) for event in EVENTS] == [(hook, {argument: "it"})] * 2

    def test_guard_http_gives_the_guards_of_plugins_in_their_order(self) -> None:
        """The API process calls it (tests/faults/test_front.py); plugins that return None have no guard."""
        hooks = Hooks()
        guards = [HttpGuard(), HttpGuard()]
        for answer in (guards[1], None, guards[0]):
            hooks.add(Guarding(answer))
        assert hooks.call.guard_http(front=None) == guards

    def test_api_services_are_there_for_routers(self) -> None:
        """What a plugin builds for the APIs, they find by its name."""
        more = Plugin("all", "1", hooks=(f"{__name__}:AllOfThem",))
        registry = Registry.discover().with_plugins(more, distribution="pegboard")
        resolved = compose(data={"model": {"path": "x"}, "apis": ["native"]}, env={}, registry=registry)
        _, [(_, router)] = build_api(resolved, FakeEngineClient(), Hooks.load(registry, resolved.plugin_options))
        assert router.ctx.services["events"] is EVENTS
        assert router.ctx.providers["session_store"] == ["in_memory"]

    def test_model_names_are_added_once_each(self, caplog: pytest.LogCaptureFixture) -> None:
        """What a hook answers now counts, and one that cannot answer adds none."""
        answers: list[Any] = [["red", "m"], ("blue", "red"), "green", [3], [""], None, KeyError("out")]

        def asked(answer: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        names = ModelNames([functools.partial(asked, answer) for answer in answers])
        info = replace(INFO, other_names=("b",))
        for _ in range(3):
            assert names.added_to(info).names == ("m", "b", "red", "blue")
        assert len(caplog.records) == 4, "a line for each that fails, not for each request"
        answers[0].append("yellow")
        assert names.added_to(info).names == ("m", "b", "red", "yellow", "blue")
        assert ModelNames().added_to(info) is info


class TestSteps:
    def test_each_step_calls_each_hook_once_in_order(self, engine: Engine) -> None:
        engine.generate([[3, 4, 5]], greedy(4))
        step = ["batch_scheduled", "before_forward", "after_forward", "batch_committed"]
        assert step_calls() == step * 4 + ["requests_finished"]

    def test_chunks_are_steps(self, checkpoint: Path) -> None:
        with start(checkpoint, Recorder, scheduler={"chunked_prefill_size": 16}) as engine:
            engine.generate([list(range(3, 43))], greedy(1))
        assert [event.facts["tokens"] for event in calls("batch_scheduled")] == [16, 16, 8]
        assert step_calls().count("batch_committed") == 3

    def test_batch_scheduled_when_memory_is_allocated(self, engine: Engine) -> None:
        engine.generate([[3, 4, 5], [6, 7]], greedy(3))
        scheduled = calls("batch_scheduled")
        assert all(event.facts["room"] for event in scheduled)
        assert [len(event.facts["reqs"]) for event in scheduled] == [2, 2, 2]

    def test_what_a_stage_packs_reaches_the_model(self, checkpoint: Path) -> None:
        with start(checkpoint, Recorder, Miscounting) as engine:
            engine.generate([[3, 4, 5], [6, 7]], greedy(3))
        found = [event.facts["batch"].extras["acme.place"].tolist() for event in calls("before_forward")]
        assert found == [[0, 1, 2, 3, 4], [0, 1], [0, 1]]

    def test_pipeline_stages_device_parts_and_frontend_stages_make_one_feature(self, checkpoint: Path) -> None:
        """Each half hears the others; a request that does not ask for it is not concerned."""
        with start(checkpoint, Doubling) as engine:
            asks, plain = engine.run([GenerateRequest(prompt=[3, 4], sampling=greedy(3), params=p) for p in (ASKS, {})])
        assert asks.extra == {"double": [2 * token for token in asks.token_ids]}
        assert plain.extra == {}

    def test_kv_layers_adds_layers_to_kv_memory(self, checkpoint: Path) -> None:
        """Their memory is zeros, and that of the model's layers is as before."""
        with start(checkpoint, Reserving) as engine:
            pool, layers = engine.built.pool, engine.built.runner.ctx.spec.layers
            assert pool.layer_ids == (*(layer.layer_id for layer in layers), len(layers))
            engine.generate([[3, 4]], greedy(3))
            assert not pool.keys(len(layers)).any()

    def test_followers_run_what_the_engine_runs(self, checkpoint: Path) -> None:
        """They are started before weights are read, say what room they have, and lead once KV memory is sized."""
        with start(checkpoint, Leading) as engine:
            engine.generate([[3, 4]], greedy(3))
            slots = engine.built.pool.num_slots
        begin, *_, lead = calls = [event for event in EVENTS if event.hook in FOLLOWING]
        assert tuple(event.hook for event in calls) == FOLLOWING
        assert begin.facts["ctx"].offers
        assert begin.facts["ctx"].facts().keys() == {"versions", "config.json", "weights", "providers"}
        assert lead.facts["pages"] == ROOM < slots

    def test_one_plugin_may_start_followers(self, checkpoint: Path) -> None:
        with pytest.raises(PluginError, match="one plugin may bring followers, not recorder0 and recorder1"):
            start(checkpoint, Leading, LeadingToo)
        assert [event.hook for event in EVENTS].count("end") == 2
        with pytest.raises(PluginError, match="3 is not a Followers"):
            start(checkpoint, LeadingNothing)

    @pytest.mark.parametrize("hook", ["kv_layers", "pipeline_stages", "device_parts", "frontend_stages"])
    def test_what_they_bring_is_checked(self, checkpoint: Path, hook: str) -> None:
        broken = type("Broken", (), {hook: hookimpl(lambda self: 3 if hook == "kv_layers" else [3])})
        globals()["Broken"] = broken
        with pytest.raises(PluginError, match=rf"{hook} of plugin 'recorder0' \(test-hooks 0\): 3 is not a"):
            start(checkpoint, broken)

    def test_a_wrong_array_is_told_with_its_plugin(self, checkpoint: Path) -> None:
        with start(checkpoint, Miscounting) as engine:
            good, bad, other = engine.generate([[3, 4], list(range(3, 13)), [5]], greedy(3))
            failures = engine.built.scheduler.info()["plugin_failures_by"]
        assert (len(good.token_ids), len(other.token_ids)) == (3, 3)
        assert bad.finish_reason == {
            "type": "abort",
            "message": "the stage 'acme' (recorder0, test-hooks 0) failed: ValueError: extras 'acme.slot': "
            "expected 1 entries, one for each request of batch.reqs, got 2",
            "status": 500,
        }
        assert failures == {"stage": {"acme": 1}}

    def test_before_forward_and_after_forward_see_one_batch(self, engine: Engine) -> None:
        engine.generate([[3, 4, 5], [6, 7]], greedy(3))
        before, after = calls("before_forward"), calls("after_forward")
        assert [event.facts["tokens"] for event in before] == [5, 2, 2]
        assert [event.facts["sampled"] for event in after] == [2, 2, 2]
        assert all(b.facts["batch"] is a.facts["batch"] for b, a in zip(before, after, strict=True))
        assert isinstance(before[0].facts["batch"], ForwardBatch)

    def test_batch_committed_when_tokens_are_appended(self, engine: Engine) -> None:
        engine.generate([[3, 4, 5], [6, 7]], [greedy(2), greedy(3)])
        scheduled, committed = calls("batch_scheduled"), calls("batch_committed")
        for before, after in zip(scheduled, committed, strict=True):
            grown = {rid: length + 1 for rid, length in before.facts["output_lens"].items()}
            assert after.facts["output_lens"] == grown
        assert [len(event.facts["finished"]) for event in committed] == [0, 1, 1]

    def test_requests_finished_with_all_of_a_step_while_they_hold_memory(self, engine: Engine) -> None:
        engine.generate([[3, 4, 5], [6, 7], [8, 9]], [greedy(2), greedy(2), greedy(4)])
        finished = calls("requests_finished")
        assert [len(event.facts["reqs"]) for event in finished] == [2, 1]
        assert all(event.facts["held"] for event in finished)
        for event, later in pairwise(EVENTS):
            if later.hook == "requests_finished":
                assert event.hook == "batch_committed"
                assert set(later.facts["reqs"]) == event.facts["finished"]

    def test_requests_finished_for_an_aborted_one(self, engine: Engine) -> None:
        scheduler = engine.built.scheduler
        request = engine._intake.prepare(GenerateRequest(prompt=[3, 4, 5], sampling=greedy(50)))
        scheduler.receive([TokenizedBatch(requests=[request])])
        scheduler.step()
        scheduler.receive([AbortRequest(rid=request.rid)])
        while not scheduler.idle:
            scheduler.step()
        (event,) = calls("requests_finished")
        assert event.facts == {"reqs": [request.rid], "held": True}

    def test_a_failed_forward_commits_nothing(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("the model is out")

        monkeypatch.setattr(type(engine.built.runner), "execute", fail)
        engine.generate([[3, 4, 5]], greedy(4))
        assert step_calls() == ["batch_scheduled", "before_forward", "requests_finished"]

    @pytest.mark.parametrize("order", [(First, Second), (Second, First)])
    def test_plugins_are_called_in_their_order(self, checkpoint: Path, order: tuple[type, ...]) -> None:
        with start(checkpoint, *order) as engine:
            engine.generate([[3, 4, 5]], greedy(1))
        assert [event.hook for event in EVENTS] == [one.__name__.lower() for one in order]
