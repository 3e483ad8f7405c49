"""Queries of dashboard and alerts, asked of a real Prometheus that scrapes a loaded server, where there is one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from tests.deploy.test_monitoring import DEPLOY, queries

PROMETHEUS = shutil.which("prometheus")
WINDOW = "20s"

pytestmark = [pytest.mark.full, pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")]

# What this server has none of: media, tiers, traces, plugins that raise; and what alerts find wrong.
EMPTY = re.compile(r"_mm_|_kv_tiers|_trace_|_plugin_failures|Pegboard")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    config = {"model": {"path": str(model), "dtype": "float32"}, "memory": {"max_total_tokens": 1024}}
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as found:
        yield found


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Run Prometheus with the config of deploy/, but for whom it asks, and how often."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    del scrape["authorization"]
    scrape["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [
        str(PROMETHEUS),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
            wait_for(lambda: answers(client), process, folder / "log")
            yield client
    finally:
        process.terminate()
        process.wait(60)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/status/config").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, log.read_text("utf-8")
        assert time.monotonic() < deadline, log.read_text("utf-8")
        time.sleep(0.1)


def ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    for name, value in (("$__rate_interval", WINDOW), ("$model", ".*"), ("$instance", ".*")):
        query = query.replace(name, value)
    answer = client.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    result = answer["data"]["result"]
    assert isinstance(result, list)
    return result


def load(server: Served) -> None:
    """Send prompts that repeat, and one that is refused."""
    body = {"text": "hello " * 20, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    for _ in range(4):
        assert httpx.post(f"{server.address}/generate", json=body, timeout=60).status_code == 200
    assert httpx.post(f"{server.address}/generate", json={"text": ""}, timeout=60).status_code == 400


def test_every_query_is_answered(server: Served, tmp_path: Path) -> None:
    with prometheus(tmp_path, server.address.removeprefix("http://")) as client:
        deadline = time.monotonic() + 60
        # Rates need two scrapes with something in between.
        while not ask(client, "rate(pegboard_generation_tokens_total[20s]) > 0"):
            assert time.monotonic() < deadline
            load(server)
        found = {name: ask(client, query) for name, query in queries().items()}
        silent = {name for name, result in found.items() if not result}
        assert silent == {name for name, query in queries().items() if EMPTY.search(name) or EMPTY.search(query)}
        rules = client.get("/rules").json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        assert len(rules) == sum(1 for name in queries() if name.startswith("Pegboard"))
