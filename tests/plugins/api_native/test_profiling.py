"""The profiler's routes: what reaches the engine, and what comes back of its answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.conformance.asgi import Exchange
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.servers import serving
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.router import NativeRouter
from pegboard.toolkit.http.app import build_app


class Profiled(FakeEngineClient):
    def __init__(self, refuse: InvalidRequest | None = None) -> None:
        super().__init__()
        self.refusal = refuse
        self.control_answers = {"start_profile": {"path": "/t/1", "num_steps": 3}, "stop_profile": {"path": "/t/1"}}

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return await super().control(action, args)


def post(path: str, body: bytes, refuse: InvalidRequest | None = None) -> tuple[Exchange, Profiled]:
    async def scene() -> tuple[Exchange, Profiled]:
        client = Profiled(refuse)
        router = NativeRouter(NativeOptions(), ApiContext(client=client, max_body_bytes=10**6))  # type: ignore[call-arg]
        return await Exchange(build_app([("native", router)], max_body_bytes=10**6), "POST", path, body).end(), client

    return asyncio.run(scene())


def test_all_fields_reach_the_engine() -> None:
    arguments = {
        "output_dir": "today",
        "num_steps": 3,
        "activities": ["CPU"],
        "with_stack": False,
        "record_shapes": True,
    }
    done, client = post("/start_profile", json.dumps({**arguments, "profile_by_stage": False}).encode())
    assert (done.status, done.json()) == (200, {"success": True, "path": "/t/1", "num_steps": 3})
    assert client.controls == [("start_profile", arguments)]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"num_steps": null}'])
def test_nothing_needs_to_be_said(body: bytes) -> None:
    done, client = post("/start_profile", body)
    assert done.status == 200
    assert client.controls == [("start_profile", {})]


def test_stop() -> None:
    done, client = post("/stop_profile", b"")
    assert (done.status, done.json()) == (200, {"success": True, "path": "/t/1"})
    assert client.controls == [("stop_profile", {})]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", "many"),
        ("activities", "CPU"),
        ("with_stack", "yes"),
        ("output_dir", 5),
        ("profile_by_stage", True),
        ("merge_profiles", True),
        ("start_step", 10),
        ("profile_stages", ["decode"]),
    ],
)
def test_wrong_and_unsupported_fields_are_named(field: str, value: object) -> None:
    done, client = post("/start_profile", json.dumps({field: value}).encode())
    assert done.status == 400
    assert done.json()["error"]["param"] == field
    assert client.controls == []


def test_a_refusal_keeps_its_status() -> None:
    done, _ = post("/start_profile", b"", InvalidRequest("not here", code="not_configured", status=403))
    assert (done.status, done.json()["error"]["code"]) == (403, "not_configured")


@pytest.mark.slow
@pytest.mark.parametrize("loop", [pytest.param("normal", marks=pytest.mark.full), "overlap"])
def test_traces_and_json_logs_of_a_running_server(tmp_path: Path, loop: str) -> None:
    """Both loops, since one of them computes in a thread of its own; and the log lines of what was served meanwhile."""
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "memory": {"max_total_tokens": 1024},
        "scheduler": {"loop": loop, "decode_log_interval": 2},
        "server": {"profile_dir": str(tmp_path / "traces")},
        "log_format": "json",
        "log_requests": True,
    }
    body = {"text": "hello", "rid": "r1", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:

        def ask(path: str, data: Any) -> httpx.Response:
            return httpx.post(f"{server.address}{path}", json=data, timeout=60)

        outside = ask("/start_profile", {"output_dir": "/tmp/elsewhere"})
        assert (outside.status_code, outside.json()["error"]["param"]) == (403, "output_dir")
        started = ask("/start_profile", {"with_stack": False, "record_shapes": True, "activities": ["CPU"]})
        assert started.status_code == 200, started.text
        assert ask("/start_profile", {}).status_code == 409
        assert ask("/generate", body).status_code == 200
        stopped = ask("/stop_profile", None)
        assert stopped.json()["path"] == started.json()["path"]
        assert ask("/stop_profile", None).status_code == 409
        log = server.log()
    trace = Path(stopped.json()["path"])
    assert trace.parent == tmp_path / "traces"
    with gzip.open(trace) as file:
        names = {str(event.get("name")) for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "aten::linear"} & names, sorted(names)
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    by_event: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_event.setdefault(line.get("event", ""), []).append(line)
    [request] = by_event["request"]
    assert (request["rid"], request["output_tokens"], request["process"]) == ("r1", 8, "scheduler")
    assert request["e2e_s"] >= request["ttft_s"] > 0
    assert by_event["prefill"][0]["new_requests"] == 1
    assert by_event["decode"][0]["running"] == 1
