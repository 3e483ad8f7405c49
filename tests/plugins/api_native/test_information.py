"""What can be known of a server, and whether it is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pegboard.conformance.asgi import PATIENCE
from pegboard.core.interfaces.client import GenerateRequest, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.toolkit.http.weight_version import ServedWeights
from tests.faults.whole_api import ask, bearer, whole_app
from tests.plugins.api_native.asking import CheckedClient, Server, played


class Counting(CheckedClient):
    """Has figures of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: dict[str, Any] = {"waiting_requests": 1, "running_requests": 2}

    async def server_info(self) -> dict[str, Any]:
        return {"config": {"x": 1}, "scheduler": dict(self.scheduler), "ready": self.is_ready}


def test_alive_and_ready() -> None:
    async def scene(server: Server) -> None:
        for path in ("/health", "/ping", "/ready", "/health_generate"):
            done = await server.get(path)
            assert (done.status, done.body) == (200, b"")
        assert server.client.requests[0].sampling.max_new_tokens == 1
        server.client.is_ready = False
        for path, status in (("/health", 200), ("/ping", 200), ("/ready", 503), ("/health_generate", 503)):
            assert (await server.get(path)).status == status
        assert len(server.client.requests) == 1
        assert "retry-after" in (await server.get("/health_generate")).headers

    played(scene)


async def with_counters(server: Server) -> Counting:
    client = Counting()
    server.client, server.app = client, Server.of(client, NativeOptions(health_timeout=0.05)).app
    return client


def test_a_paused_engine_is_not_well() -> None:
    async def scene(server: Server) -> None:
        client = await with_counters(server)
        client.scheduler["paused"] = True
        done = await server.get("/health_generate")
        assert (done.status, done.json()["error"]["code"]) == (503, "paused")
        assert client.requests == []

    played(scene)


@pytest.mark.parametrize(
    ("progress", "status"), [("generated_tokens", 200), ("prompt_tokens", 200), ("accepted", 503), ("", 503)]
)
def test_a_probe_that_waits_asks_whether_others_got_on(progress: str, status: int) -> None:
    """By tokens of answers, or by those of prompts, which may be long."""

    async def scene(server: Server) -> None:
        client = await with_counters(server)
        client.stall_at = 0
        submit = client.submit

        async def meanwhile(request: GenerateRequest) -> OutputStream:
            client.scheduler[progress] = 10
            return await submit(request)

        client.submit = meanwhile  # type: ignore[method-assign]
        done = await server.get("/health_generate")
        assert done.status == status
        if status == 503:
            assert done.json()["error"]["code"] == "no_progress"
        assert client.aborted == [client.requests[0].rid], "nobody waits for it any more"

    played(scene)


@pytest.mark.parametrize("looks", [1, 2, None])
def test_a_full_queue_is_no_illness(looks: int | None) -> None:
    """As long as the engine gets on; here it does so after this many looks at it."""

    class Full(Counting):
        looked = 0

        async def server_info(self) -> dict[str, Any]:
            if self.looked == looks:
                self.scheduler["generated_tokens"] = 10
            self.looked += 1
            return await super().server_info()

    async def scene(server: Server) -> None:
        client = Full()
        client.refuse = InvalidRequest("8 requests are waiting", code="queue_full", status=503)
        server.app = Server.of(client, NativeOptions(health_timeout=0.05 if looks is None else PATIENCE)).app
        done = await server.get("/health_generate")
        assert done.status == (503 if looks is None else 200)
        if looks is None:
            assert done.json()["error"]["code"] == "no_progress"

    played(scene)


def test_a_probe_that_is_refused_for_another_reason() -> None:
    async def scene(server: Server) -> None:
        client = await with_counters(server)
        client.refuse = InvalidRequest("over", code="shutting_down", status=503)
        done = await server.get("/health_generate")
        assert (done.status, done.json()["error"]["code"]) == (503, "shutting_down")

    played(scene)


def test_a_client_that_leaves_ends_the_probe() -> None:
    async def scene(server: Server) -> None:
        server.client.stall_at = 0
        exchange = server.begin("/health_generate", b"")
        exchange._scope["method"] = "GET"
        await asyncio.wait_for(server.client.submitted.wait(), PATIENCE)
        for _ in range(20):
            await asyncio.sleep(0)
        exchange.leave()
        await exchange.end()
        assert len(server.client.aborted) == 1

    played(scene)


def test_the_model() -> None:
    async def scene(server: Server) -> None:
        for path in ("/model_info", "/get_model_info"):
            info = (await server.get(path)).json()
            assert info["model_path"] == "/models/fake"
            assert info["max_context_length"] == 4096
            assert (info["model_type"], info["architectures"]) == ("fake", ["FakeForCausalLM", "FakeModel"])
            assert info["served_model_names"] == ["fake-model"]
            assert "grammar.regex" in info["features"]
        assert (await server.get("/get_weight_version")).json() == {"weight_version": "default"}
        assert (await server.get("/version")).json() == {"version": "0"}

    played(scene)


def test_weights_that_have_no_meaning() -> None:
    """The server is not healthy until they have one again, and everything tells their version."""
    weights = ServedWeights()

    class Lending(CheckedClient):
        @property
        def services(self) -> Mapping[str, object]:
            return {"acme": weights}

    async def scene(server: Server) -> None:
        server.client = Lending()
        server.app = Server.of(server.client, NativeOptions(health_timeout=1.0)).app
        weights.learn("v2")
        assert (await server.get("/health")).status == 200
        assert (await server.get("/get_weight_version")).json() == {"weight_version": "v2"}
        assert (await server.get("/model_info")).json()["weight_version"] == "v2"
        weights.fault = "an update has failed"
        for path in ("/health", "/ping", "/ready", "/health_generate"):
            answer = await server.get(path)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "weights_broken")
        weights.learn("v3")
        assert (await server.get("/health")).status == 200

    played(scene)


def test_the_server() -> None:
    async def scene(server: Server) -> None:
        await with_counters(server)
        for path in ("/server_info", "/get_server_info"):
            info = (await server.get(path)).json()
            assert (info["ready"], info["version"], info["config"]) == (True, "0", {"x": 1})
            assert info["scheduler"]["running_requests"] == 2
            assert info["model_info"]["served_model_name"] == info["served_model_name"] == "fake-model"
            assert (info["model_path"], info["dp_size"], info["max_total_num_tokens"]) == ("/models/fake", 1, 65536)
            assert "model" not in info, "SGLang's router wants a text there, or nothing"
            assert info["providers"] == {"sampler": ["torch"], "tool_parser": ["brackets"]}
            assert info["sessions"]["open"] == 0

    played(scene)


def test_users_are_told_of_the_model_and_no_more() -> None:
    """Routers have a user's key, and need to know what is served."""

    async def scene() -> tuple[dict[str, Any], dict[str, Any]]:
        app = whole_app(api_key="user", admin_key="admin")
        found = [await ask(app, "GET", "/server_info", **bearer(key)) for key in ("user", "admin")]  # type: ignore[arg-type]
        return found[0].json(), found[1].json()

    user, admin = asyncio.run(scene())
    assert user["served_model_name"] == "fake-model"
    assert set(admin) - set(user) == {"config", "scheduler", "providers", "sessions"}
    assert {name: admin[name] for name in user} == user


def test_the_load() -> None:
    async def scene(server: Server) -> None:
        client = await with_counters(server)
        client.scheduler |= {"blocked_requests": 4, "held_tokens": 20, "locked_tokens": 5, "total_tokens": 100}
        body = (await server.get("/v1/loads")).json()
        [load] = body["loads"]
        assert (load["num_reqs"], load["num_running_reqs"], load["num_waiting_reqs"]) == (7, 2, 5)
        assert (load["num_used_tokens"], load["max_total_num_tokens"], load["token_usage"]) == (25, 100, 0.25)
        assert body["dp_rank_count"] == 1
        assert body["aggregate"]["total_reqs"] == 7
        [brief] = (await server.get("/get_load")).json()
        assert brief == {"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 5, "num_tokens": 25}
        assert (await server.get("/load")).json() == {"server_load": 7}

    played(scene)
