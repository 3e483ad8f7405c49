"""The application for Ray Serve: two replicas behind one address, one of which is killed. Run by `make ray`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.servers import free_ports
from pegboard.core.interfaces.errors import ConfigError, PegboardError
from tests.e2e.reference import Answer, Comparison
from tests.parallel.prompts import LENGTH, PROMPTS
from tests.parallel.ray_cluster import PATIENCE, cluster, workers

ray = pytest.importorskip("ray", reason="make ray installs it")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

REPLICA = "ServeReplica:default:Pegboard"
CLIENTS = 4


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "config.yaml"
    data = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "runner": {"use": "layered"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 8192},
        "server": {"shutdown_timeout": 5},
    }
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="module")
def address(config: Path) -> Iterator[str]:
    """Where two replicas are served, as docs/parallel.md has it."""
    (port,) = free_ports(1)
    deployment = {
        "num_replicas": 2,
        "ray_actor_options": {"num_cpus": 1},
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 20,
    }
    serve_config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "default",
                "import_path": "pegboard.tools.ray_serve:app",
                "args": {"config": str(config), "set": ["log_level=warning"], "deployment": deployment},
            }
        ],
    }
    path = config.with_name("serve.yaml")
    path.write_text(json.dumps(serve_config))
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(path)]
    with cluster(cpus=4) as nodes:
        environment = {**os.environ, "RAY_ADDRESS": nodes.address, "RAY_USAGE_STATS_ENABLED": "0"}
        with config.with_name("serve.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            found = f"http://127.0.0.1:{port}"
            until(lambda: process.poll() is not None or all_ready(found), "it is served by both")
            assert process.poll() is None, config.with_name("serve.log").read_text()
            yield found
            replicas, running = workers(REPLICA), servers()
            assert len(running) == 2
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        _, left = psutil.wait_procs([*replicas, *running], PATIENCE)
        assert not left, f"{left} go on"


def until(found: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (it := found()):
        assert time.monotonic() < end, f"{what}: it does not happen"
        time.sleep(0.1)
    return it


def answers(address: str) -> bool:
    with contextlib.suppress(httpx.TransportError, httpx.UnsupportedProtocol):
        return httpx.get(f"{address}/ready", timeout=PATIENCE).status_code == 200
    return False


def all_ready(address: str) -> bool:
    """Return whether two replicas can answer, and Ray Serve knows it."""
    found = servers()
    return len(found) == 2 and all(answers(own_address(server)) for server in found) and answers(address)


def own_address(server: psutil.Process) -> str:
    """Return where a replica's server listens; "" where it does not yet."""
    with contextlib.suppress(psutil.Error):
        for one in server.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                return f"http://{one.laddr.ip}:{one.laddr.port}"
    return ""


def servers() -> list[psutil.Process]:
    """Return the servers of all replicas."""
    found = []
    for replica in workers(REPLICA):
        with contextlib.suppress(psutil.Error):
            found += [one for one in replica.children() if one.cmdline()[1:4] == ["-m", "pegboard", "serve"]]
    return found


def body(ids: list[int], length: int = LENGTH, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": params, **more}


def right(address: str, expected: list[Answer]) -> None:
    comparison = Comparison()
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        got = httpx.post(f"{address}/generate", json=body(prompt), timeout=PATIENCE)
        assert got.status_code == 200, got.text
        comparison.add(got.json()["output_ids"], answer, str(prompt[:3]))
    comparison.finish()


def test_answers_are_those_of_transformers(address: str, expected: list[Answer]) -> None:
    assert len(workers(REPLICA)) == len(servers()) == 2
    right(address, expected)


def test_answers_are_streamed_as_they_are_computed(address: str) -> None:
    """A client that goes in the midst of one ends its request: nothing runs on."""
    with httpx.stream("POST", f"{address}/generate", json=body([5, 6], 6000, stream=True), timeout=PATIENCE) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = got.iter_lines()  # the connection ends with this
        assert next(lines).startswith("data: ")
        assert running(), "the answer goes on"
    until(lambda: not running(), "the request ends with its client")


def running() -> int:
    """Return how many requests run on all servers."""
    count = 0
    for server in servers():
        info = httpx.get(f"{own_address(server)}/server_info", timeout=PATIENCE)
        assert info.status_code == 200, info.text
        count += info.json()["scheduler"]["running_requests"]
    return count


def test_what_the_server_says_is_passed_on(address: str) -> None:
    refused = httpx.post(f"{address}/generate", json={"input_ids": "x"}, timeout=PATIENCE)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"]
    assert httpx.get(f"{address}/no/such/route", timeout=PATIENCE).status_code == 404
    rebound = httpx.get(f"{address}/v1/models", headers={"host": "rebound.example"}, timeout=PATIENCE)
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "unknown_host")
    models = httpx.get(f"{address}/v1/models?x=1", timeout=PATIENCE)
    assert models.json()["data"]
    assert models.headers["content-type"] == "application/json"


def test_a_replica_is_killed_under_load(address: str, expected: list[Answer]) -> None:
    """Its requests fail, the other one answers, and another one takes its place."""
    comparison, failed, ending = Comparison(), [], threading.Event()
    lock = threading.Lock()

    def ask(number: int) -> None:
        while not ending.is_set():
            which = number % len(PROMPTS)
            try:
                got = httpx.post(f"{address}/generate", json=body(PROMPTS[which]), timeout=PATIENCE)
            except httpx.TransportError as error:
                failed.append(repr(error))
                continue
            with lock:
                if got.status_code == 200:
                    comparison.add(got.json()["output_ids"], expected[which], f"prompt {which}")
                else:
                    assert got.status_code >= 500, got.text
                    failed.append(got.text)
            number += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2.0)
        before = {one.pid for one in workers(REPLICA)}
        victim = workers(REPLICA)[0]
        (server,) = [one for one in servers() if one.ppid() == victim.pid]
        victim.kill()
        server.wait(PATIENCE)
        until(lambda: {one.pid for one in workers(REPLICA)} != before and all_ready(address), "a replica comes")
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    comparison.finish()
    right(address, expected)


def test_a_server_that_ends_is_replaced(address: str, expected: list[Answer]) -> None:
    """The replica's own process is well, and its health is the server's."""
    server = servers()[0]
    server.kill()
    server.wait(PATIENCE)
    until(lambda: all_ready(address), "another one comes")
    right(address, expected)


def test_options_of_the_deployment_are_passed_on(config: Path) -> None:
    from pegboard.tools.ray_serve import MOST_REQUESTS, Arguments, app, deployment_options

    deployment: dict[str, Any] = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}
    options = deployment_options(Arguments(config=str(config), deployment=deployment), 20.0)
    assert options["autoscaling_config"] == deployment["autoscaling_config"]
    assert options["max_ongoing_requests"] == MOST_REQUESTS
    assert app({"config": str(config), "deployment": deployment}), "Ray Serve takes them"
    with pytest.raises(ValueError, match="min_replicas"):
        app({"config": str(config), "deployment": {"autoscaling_config": {"min_replicas": 3, "max_replicas": 1}}})


def test_what_cannot_be_served_is_said_at_once(config: Path) -> None:
    from pegboard.tools.ray_serve import app

    with pytest.raises(PegboardError, match="replicas: Extra inputs are not permitted"):
        app({"config": str(config), "replicas": 2})
    with pytest.raises(PegboardError, match="config: Field required"):
        app({})
    with pytest.raises(ConfigError, match="runner"):
        app({"config": str(config), "set": ["runner.use=no_such_runner"]})
