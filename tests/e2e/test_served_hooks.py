"""Hooks in the two processes of a server: which one calls which."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving

pytestmark = pytest.mark.slow

PLUGIN = """
import os
import sys

from pegboard.core.interfaces import Plugin, hookimpl

NAMES, ASKED = ["red", "blue"], []


class Clumsy:
    @hookimpl
    def model_names(self):
        raise KeyError("no names")


def note(hook):
    process = "scheduler" if "torch" in sys.modules else "api"
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{process} {hook}\\n")


class Notes:
    @hookimpl
    def configure(self, config):
        note(f"configure {config.model.dtype}")

    @hookimpl
    def register_routes(self, app, client):
        note("register_routes")

        @app.get("/hello")
        def hello():
            return {"routes": sorted(app.openapi()["paths"])}

        @app.get("/asked")
        async def asked():
            return await client.control("notes.asked")

    @hookimpl
    def model_names(self):
        return NAMES

    @hookimpl
    def engine_started(self, info, engine):
        note("engine_started")
        engine.add_control("notes.asked", lambda args: {"models": ASKED})

    @hookimpl
    def idle(self):
        note("idle")

    @hookimpl
    def batch_committed(self, batch):
        note("batch_committed")

    @hookimpl
    def requests_finished(self, reqs):
        ASKED.extend(req.model for req in reqs)

    @hookimpl
    def shutdown(self):
        note("shutdown")


plugin = Plugin("notes", "1", hooks=("notes_plugin:Notes", "notes_plugin:Clumsy"))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that looks as if a distribution with the plugin was installed into it."""
    info = tmp_path / "site" / "notes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pegboard]\nnotes = notes_plugin:plugin\n")
    (tmp_path / "site" / "notes_plugin.py").write_text(PLUGIN)
    return tmp_path / "site"


def chat(address: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 1, "temperature": 0}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=60)


def test_each_process_calls_its_own(site: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32", "served_name": ["m", "tiny"]},
        "memory": {"max_total_tokens": 1024},
        "plugins": {"notes": True},
    }
    env = {**os.environ, "PYTHONPATH": str(site), "NOTES": str(notes), "OMP_NUM_THREADS": "1"}
    with serving(config, env=env) as server:
        routes = httpx.get(f"{server.address}/hello").json()["routes"]
        body = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
        assert httpx.post(f"{server.address}/generate", json=body, timeout=60).status_code == 200
        listed = httpx.get(f"{server.address}/v1/models").json()["data"]
        chats = {name: chat(server.address, name) for name in ("blue", "", str(model), "tiny", "green")}
        asked = httpx.get(f"{server.address}/asked").json()["models"]
    assert "/generate" in routes, "the routers of the config are there when register_routes is called"
    assert [card["id"] for card in listed] == ["m", "tiny", "red", "blue"]
    assert {name: done.status_code for name, done in chats.items()} == {**dict.fromkeys(chats, 200), "green": 404}
    assert "this server has 'm', 'tiny', 'red', 'blue'" in chats["green"].text
    assert asked == ["m", "blue", "m", "m", "tiny"], "the served name that each of them asked for"
    lines = notes.read_text().splitlines()
    api = [line.removeprefix("api ") for line in lines if line.startswith("api ")]
    scheduler = [line.removeprefix("scheduler ") for line in lines if line.startswith("scheduler ")]
    assert api == ["configure float32", "register_routes", "shutdown"]
    assert scheduler == [
        "configure float32",
        "engine_started",
        *["batch_committed"] * 3,
        "idle",
        *["batch_committed", "idle"] * 4,
        "shutdown",
    ]
