"""The routes: who may use them, what they ask of the scheduler, and what they answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pegboard.conformance.asgi import Exchange
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.adapters.controls import Controls
from pegboard.plugins.adapters.frontend import KnownAdapters
from pegboard.plugins.adapters.options import AdapterSection
from pegboard.plugins.adapters.routes import Routes
from pegboard.plugins.adapters.stage import Adapters
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.route_table import levels
from tests.plugins.adapters.test_store import Far

PATHS = [f"{prefix}/{action}_lora_adapter" for prefix in ("", "/v1") for action in ("load", "unload")]


class Client(FakeEngineClient):
    """An engine with adapters. A load ends once it has been asked for `looks` times; one of /bad fails."""

    def __init__(self, looks: int = 2) -> None:
        super().__init__()
        self.far, stage = Far(), Adapters(AdapterSection(slots=2, host_bytes=1000))
        self.store = stage.store
        self.store.ask = self.far.ask
        self._controls = Controls(stage)
        self.stage = stage
        self._looks, self._asked = looks, 0

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        self.controls.append((action, args or {}))
        if action == "adapter_state":
            self._asked += 1
            if self.far.orders and self._asked % self._looks == 0:
                order = self.far.orders.pop(0)
                self.far.end(order.uid, "damaged" if order.path == "/bad" else "")
        run = {
            "load_adapter": self._controls.load,
            "unload_adapter": self._controls.unload,
            "adapter_state": self._controls.state,
            "list_adapters": self._controls.list,
        }[action]
        return run(args or {})


class Rig:
    """The application of one client."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.client, self.known = Client(), KnownAdapters({})
        self.app = build_app([], keys=keys)
        self.app.router.routes.extend(Routes(self.client, self.known).router().routes)

    def post(self, path: str, body: Mapping[str, Any], key: str = "") -> tuple[int | None, Any]:
        async def asked() -> Exchange:
            return await Exchange(self.app, "POST", path, json.dumps(body).encode(), key=key).end()

        done = asyncio.run(asked())
        return done.status, done.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_load_and_unload(prefix: str) -> None:
    rig = Rig()
    status, answer = rig.post(f"{prefix}/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
    assert (status, answer["success"], answer["loaded_adapters"]) == (200, True, {"a": "/a"})
    assert rig.client.controls[0] == ("load_adapter", {"name": "a", "path": "/a", "pinned": False, "replace": False})
    assert rig.known.names == {"a": "/a"}
    status, answer = rig.post(f"{prefix}/unload_lora_adapter", {"lora_name": "a"})
    assert (status, answer["loaded_adapters"]) == (200, {})
    assert not rig.known.names


def test_what_is_said_reaches_the_scheduler() -> None:
    rig = Rig()
    for said in ({"pinned": True, "replace": True}, {"load_inplace": True}):
        assert rig.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a", **said})[0] == 200
    loads = [args for action, args in rig.client.controls if action == "load_adapter"]
    assert [(args["pinned"], args["replace"]) for args in loads] == [(True, True), (False, True)]


def test_a_load_that_fails() -> None:
    rig = Rig()
    status, answer = rig.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/bad"})
    assert (status, answer["error"]["message"], answer["error"]["code"]) == (400, "damaged", "adapter_failed")
    assert not rig.known.names
    assert rig.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})[0] == 200


def test_requests_may_name_an_adapter_that_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it. Where the load fails, nothing is left of the name."""
    rig = Rig()
    control, seen = rig.client.control, []

    async def looked(action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        if action == "adapter_state":
            seen.append(dict(rig.known.names))
        return await control(action, args)

    monkeypatch.setattr(rig.client, "control", looked)
    for path, status in (("/bad", 400), ("/a", 200)):
        assert rig.post("/load_lora_adapter", {"lora_name": "a", "lora_path": path})[0] == status
        assert seen[0] == {"a": path}
        assert list(rig.known.names) == (["a"] if status == 200 else [])
        seen.clear()


def test_refusals() -> None:
    rig = Rig()
    rig.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
    for path, body, status, param in (
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, 409, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "fake-model", "lora_path": "/a"}, 400, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "a b", "lora_path": "/a"}, 400, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "x" * 257, "lora_path": "/a"}, 400, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "b", "lora_path": ""}, 400, "lora_path"),
        ("/load_lora_adapter", {"lora_name": "b", "lora_path": 5}, 400, "lora_path"),
        ("/load_lora_adapter", {"lora_path": "/a"}, 400, "lora_name"),
        ("/unload_lora_adapter", {"lora_name": "b"}, 404, "model"),
        ("/unload_lora_adapter", {}, 400, "lora_name"),
        ("/unload_lora_adapter", {"lora_name": "a", "timeout": -1}, 400, "timeout"),
        ("/unload_lora_adapter", {"lora_name": "a", "force": "perhaps"}, 400, "force"),
        ("/unload_lora_adapter", {"lora_name": "b", "force": True}, 404, "model"),
    ):
        found, answer = rig.post(path, body)
        assert (found, answer["error"]["param"]) == (status, param), (path, body, answer)
    assert rig.known.names == {"a": "/a"}


def test_one_that_is_in_use_leaves_later() -> None:
    """The answer says how many use it. New requests are refused at once, and it goes when they have ended."""
    rig = Rig()
    rig.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
    used = rig.client.store.use("a")
    status, answer = rig.post("/unload_lora_adapter", {"lora_name": "a", "timeout": 0})
    assert (status, answer["error"]["code"]) == (409, "adapter_in_use")
    assert "is gone when the 1 that use it have ended" in answer["error"]["message"]
    assert not rig.known.names
    with pytest.raises(InvalidRequest):
        rig.client.store.use("a")
    rig.client.store.unuse(used)
    assert rig.client.store.state(1).state == "gone"


def test_force_ends_the_requests_that_have_it() -> None:
    """Also those of one that is leaving already, and of no other adapter."""
    rig = Rig()
    for name in "ab":
        rig.post("/load_lora_adapter", {"lora_name": name, "lora_path": f"/{name}"})
    ended: list[tuple[list[str], str, int]] = []

    class Core:
        def end(self, reqs: list[Req], message: str, code: str, status: int) -> None:
            ended.append((sorted(req.rid for req in reqs), code, status))
            for req in reqs:
                rig.client.stage.gone(req)

    stage: Any = rig.client.stage
    stage.core = Core()
    for rid, name in (("1", "a"), ("2", "b"), ("3", "a")):
        req = Req(rid, np.array([1]), SamplingParams())
        features = {"adapters": msgspec.msgpack.encode(name)}
        stage.arrive(req, SimpleNamespace(features=features))
    assert rig.post("/unload_lora_adapter", {"lora_name": "a", "timeout": 0})[0] == 409
    status, answer = rig.post("/unload_lora_adapter", {"lora_name": "a", "force": True})
    assert (status, answer["loaded_adapters"]) == (200, {"b": "/b"})
    assert ended == [(["1", "3"], "adapter_unloaded", 503)]
    assert rig.post("/unload_lora_adapter", {"lora_name": "a", "force": True})[0] == 404
    assert rig.client.store.names["b"].users == 1


def test_routes_are_for_admins() -> None:
    keys = Keys(["user"], ["admin"])
    rig = Rig(keys)
    assert {path: levels(rig.app.routes)["POST", path] for path in PATHS} == dict.fromkeys(PATHS, "admin")
    body = {"lora_name": "a", "lora_path": "/a"}
    assert [rig.post("/load_lora_adapter", body, key)[0] for key in ("", "user", "admin")] == [401, 403, 200]


def test_a_name_that_was_unloaded_meanwhile_is_not_the_model() -> None:
    """Between the check of a name and its use an adapter may go: the scheduler refuses it then."""
    known = KnownAdapters({"a": "/a"})
    known.learn({"b": "/b"})
    info = dataclasses.replace(FakeEngineClient().info, served_name="base")
    models = ("a", "base:a", "b", "base", "", "c", "base:c")
    assert [known.meant(model, info) for model in models] == ["a", "a", "b", None, None, "c", "c"]
    known.checked = True  # no other names come here then
    assert [known.meant(model, info) for model in models] == ["a", "a", "b", *(None,) * 4]
    assert known.root_of("a") is None
    assert known.root_of("b") == "/b"
    known.forget("b")
    assert known.root_of("b") is None
