"""Ranks on a Ray cluster of two nodes, over HTTP: run by `make ray`.

Rank 0 is on the first node and rank 1 on the second. Answers are transformers'; whatever of a rank ends, clients learn
of it, the ranks start anew, and nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.servers import Served, serving
from tests.e2e.reference import Answer, Comparison
from tests.parallel.prompts import LENGTH, PROMPTS
from tests.parallel.ray_cluster import OTHER, PATIENCE, add_node, cluster, workers

ray = pytest.importorskip("ray", reason="make ray installs it")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

FOLLOWER, SCHEDULER = "pegboard.core.server.follower_process", "pegboard.core.server.scheduler_process"
LONG = 3000


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster() as made:
        yield made


def settings(model: Path, **launch: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "runner": {"use": "layered"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 4096},
        "parallel": {
            "tensor": 2,
            "cores": 2,
            "timeout": 20.0,
            "communicator": {"use": "gloo"},
            "launch": {"use": "ray", **launch},
        },
    }


def on_second_node(made: Any) -> dict[str, Any]:
    return {"address": made.address, "cpus": 1, "resources": {OTHER: 1}, "timeout": 60}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **more}


def generate(server: Served, ids: list[int], length: int = LENGTH) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params}
    return httpx.post(f"{server.address}/generate", json=body, timeout=PATIENCE)


def right(server: Served, expected: list[Answer]) -> None:
    comparison = Comparison()
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        got = generate(server, prompt)
        assert got.status_code == 200, got.text
        comparison.add(got.json()["output_ids"], answer, str(prompt[:3]))
    comparison.finish()


def followers() -> list[psutil.Process]:
    """Return the ranks other than 0, on all nodes of this test."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if FOLLOWER in process.cmdline():
                found.append(process)
    return found


def until(found: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (it := found()):
        assert time.monotonic() < end, f"{what}: it does not happen"
        time.sleep(0.1)
    return it


def ready(server: Served) -> bool:
    return httpx.get(f"{server.address}/ready", timeout=PATIENCE).status_code == 200


def told(server: Served, end: Callable[[], object]) -> str:
    """Return what a client is told whose request is running when something ends a rank."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(generate(server, [5, 6, 7], LONG)))
    asking.start()
    info = f"{server.address}/server_info"
    until(lambda: httpx.get(info, timeout=PATIENCE).json()["scheduler"]["running_requests"], "a request runs")
    end()
    asking.join(PATIENCE)
    assert answers[0].status_code == 503, answers[0].text
    return answers[0].text


def nothing_is_left(address: str, ranks: list[psutil.Process]) -> None:
    """No process, no actor, no placement group."""
    _, left = psutil.wait_procs(ranks, PATIENCE)
    assert not left, f"{left} go on"
    until(lambda: not workers("RankActor"), "actors end")
    ray.init(address, log_to_driver=False, configure_logging=False)
    try:
        until(lambda: all(one["state"] == "REMOVED" for one in groups()), "placement groups are removed")
    finally:
        ray.shutdown()


def groups() -> list[dict[str, Any]]:
    from ray.util import placement_group_table

    return list(placement_group_table().values())


def test_two_nodes(nodes: Any, model: Path, expected: list[Answer]) -> None:
    """A rank that is killed, its actor that is, and the scheduler: each time ranks start anew, and all is right."""
    with serving(settings(model, **on_second_node(nodes)), env=environment()) as server:
        (rank,) = followers()
        actor = rank.parent()
        assert actor is not None
        assert actor in workers("RankActor")
        assert rank not in psutil.Process(server.process.pid).children(recursive=True)
        right(server, expected)

        assert f"rank 1 (process {rank.pid}) was ended by signal 9" in told(server, rank.kill)
        until(lambda: ready(server), "ranks start anew")
        right(server, expected)

        (rank,) = followers()
        actor = rank.parent()
        assert actor is not None
        said = told(server, actor.kill)
        assert f"rank 1 (process {rank.pid}) ended with its actor: " in said
        until(lambda: ready(server), "ranks start anew")
        right(server, expected)
        assert not rank.is_running(), "a rank ends with its actor"

        (rank,) = followers()
        (scheduler,) = [
            one for one in psutil.Process(server.process.pid).children(recursive=True) if SCHEDULER in one.cmdline()
        ]

        def end() -> None:
            rank.suspend()  # it cannot see that its leader has gone
            scheduler.kill()

        assert "was ended by signal 9" in told(server, end)
        rank.wait(PATIENCE)
        until(lambda: ready(server), "ranks start anew")
        right(server, expected)
        last = followers()
    nothing_is_left(nodes.address, last)


def test_a_node_is_lost(nodes: Any, model: Path, expected: list[Answer]) -> None:
    """Its ranks end with it. They start anew once another node has room for them."""
    with serving(settings(model, **on_second_node(nodes)), env=environment()) as server:
        right(server, expected)
        (rank,) = followers()
        (second,) = nodes.worker_nodes
        said = told(server, lambda: nodes.remove_node(second, allow_graceful=False))
        assert f"rank 1 (process {rank.pid}) " in said
        assert not ready(server)
        rank.wait(PATIENCE)
        add_node(nodes)
        until(lambda: ready(server), "ranks start on the new node")
        right(server, expected)
        last = followers()
    nothing_is_left(nodes.address, last)


def test_a_cluster_without_room(nodes: Any, model: Path) -> None:
    launch = {**on_second_node(nodes), "resources": {OTHER: 100}, "timeout": 2}
    with pytest.raises(RuntimeError) as caught, serving(settings(model, **launch), env=environment()):
        pass
    assert "the Ray cluster has no room for 1 ranks with {'CPU': 1.0, 'other': 100.0} each (PACK)" in str(caught.value)
    nothing_is_left(nodes.address, [])


def test_a_cluster_that_is_not_there(model: Path) -> None:
    launch = {"address": "127.0.0.1:1"}
    with pytest.raises(RuntimeError) as caught, serving(settings(model, **launch), env=environment()):
        pass
    assert "the Ray cluster '127.0.0.1:1' is not there" in str(caught.value)


def test_a_cluster_for_one_server(model: Path, expected: list[Answer], tmp_path: Path) -> None:
    """It starts with the scheduler and ends with it, even where that is killed."""
    with serving(settings(model), env=environment()) as server:
        right(server, expected)
        tree = psutil.Process(server.process.pid).children(recursive=True)
        assert [one for one in tree if "raylet" in one.name()]
        (scheduler,) = [one for one in tree if SCHEDULER in one.cmdline()]
        started = scheduler.children(recursive=True)
        assert {one.pid for one in followers()} <= {one.pid for one in started}
        scheduler.kill()
        _, left = psutil.wait_procs(started, PATIENCE)
        assert not left, f"{left} go on"
        until(lambda: ready(server), "ranks start anew")
        right(server, expected)
        tree = psutil.Process(server.process.pid).children(recursive=True)
    _, left = psutil.wait_procs(tree, PATIENCE)
    assert not left, f"{left} go on after the server's end"


def test_without_gloo(model: Path) -> None:
    config = settings(model)
    config["parallel"]["communicator"] = {"use": "shm"}
    with pytest.raises(RuntimeError) as caught, serving(config, env=environment()):
        pass
    assert "set parallel.communicator.use to gloo" in str(caught.value)
