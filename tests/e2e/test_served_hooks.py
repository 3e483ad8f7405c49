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


def note(hook):
    process = "scheduler" if "torch" in sys.modules else "api"
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{process} {hook}\\n")


class Notes:
    @hookimpl
    def configure(self, config):
        note(f"configure {config.model.dtype}")

    @hookimpl
    def register_routes(self, app):
        note("register_routes")

        @app.get("/hello")
        def hello():
            return {"routes": sorted(app.openapi()["paths"])}

    @hookimpl
    def engine_started(self, info):
        note("engine_started")

    @hookimpl
    def idle(self):
        note("idle")

    @hookimpl
    def batch_committed(self, batch):
        note("batch_committed")

    @hookimpl
    def shutdown(self):
        note("shutdown")


plugin = Plugin("notes", "1", hooks=("notes_plugin:Notes",))
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


def test_each_process_calls_its_own(site: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    config = {"model": {"path": str(model), "dtype": "float32"}, "memory": {"max_total_tokens": 1024}}
    env = {**os.environ, "PYTHONPATH": str(site), "NOTES": str(notes), "OMP_NUM_THREADS": "1"}
    with serving(config, env=env) as server:
        routes = httpx.get(f"{server.address}/hello").json()["routes"]
        body = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
        assert httpx.post(f"{server.address}/generate", json=body, timeout=60).status_code == 200
    assert "/generate" in routes, "the routers of the config are there when register_routes is called"
    lines = notes.read_text().splitlines()
    api = [line.removeprefix("api ") for line in lines if line.startswith("api ")]
    scheduler = [line.removeprefix("scheduler ") for line in lines if line.startswith("scheduler ")]
    assert api == ["configure float32", "register_routes", "shutdown"]
    assert scheduler == [
        "configure float32",
        "engine_started",
        *["batch_committed"] * 3,
        "idle",
        "shutdown",
    ]
