"""SGLang's own router, a program of its own, in front of two servers: it knows what they serve, and passes requests on.

`make clients` installs it, and runs these tests.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.conformance.servers import Served, free_ports
from tests.e2e.clients import KEY, MODEL, tiny_model, tiny_server
from tests.e2e.third_party_clients.install import python_of

PYTHON = python_of("sglang-router")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there (make clients)"),
]

START_S = 60.0
MESSAGES = [{"role": "user", "content": "Hello!"}]
DOCUMENTS = ["Cats purr.", "What is it?", "Rome is a city."]


class Routed:
    """A router with two servers behind it, asked with the key of users, which is the only one that it has."""

    def __init__(self, address: str, workers: list[Served]) -> None:
        self.address = address
        self.workers = workers
        self.client = httpx.Client(base_url=address, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextlib.contextmanager
def routing(
    workers: list[Served], log: Path, *, policy: str = "round_robin", prefill: tuple[Served, int] | None = None
) -> Iterator[str]:
    """A router's address, once it has all workers. With a `prefill` server and its bootstrap port, the workers write
    the answers to what that one computes.
    """
    port, metrics = free_ports(2)
    command = [str(PYTHON), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--worker-startup-check-interval", "1", "--policy", policy, "--api-key", KEY]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    if prefill is None:
        command += ["--worker-urls", *(one.address for one in workers)]
    else:
        command += ["--pd-disaggregation", "--disable-retries", "--disable-circuit-breaker"]
        command += ["--prefill", prefill[0].address, str(prefill[1])]
        command += [word for one in workers for word in ("--decode", one.address)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, len(workers) + (prefill is not None), process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(address: str, workers: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{address}/workers", headers={"authorization": f"Bearer {KEY}"})
            if answer.status_code == 200 and sum(one["is_healthy"] for one in answer.json()["workers"]) == workers:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the router has not found its workers:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    log = tmp_path_factory.mktemp("router") / "router.log"
    with tiny_server(model) as one, tiny_server(model) as other, routing([one, other], log) as address:
        found = Routed(address, [one, other])
        yield found
        found.client.close()


def test_it_knows_what_is_served(routed: Routed) -> None:
    """With a user's key alone: it reads `/server_info` and `/model_info` of each."""
    workers = routed.get("/workers")["workers"]
    assert [one["model_id"] for one in workers] == [MODEL, MODEL]
    known = workers[0]["metadata"]
    assert (known["served_model_name"], known["model_type"], known["dp_size"]) == (MODEL, "mistral", "1")
    assert json.loads(known["architectures"]) == ["MistralForCausalLM"]
    assert known["model_path"]
    assert [one["id"] for one in routed.get("/v1/models")["data"]] == [MODEL]


@pytest.mark.parametrize("named", [{"model": MODEL}, {}])
def test_chats(routed: Routed, named: dict[str, str]) -> None:
    """Also where the client leaves out the model's name, for which the router writes "unknown"."""
    settings = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **named}
    whole = routed.post("/v1/chat/completions", **settings)
    assert whole["model"] == MODEL
    assert whole["usage"]["completion_tokens"] == 8
    with routed.client.stream("POST", "/v1/chat/completions", json={**settings, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(one.get("content") or "" for one in deltas) == whole["choices"][0]["message"]["content"]


def test_generate(routed: Routed) -> None:
    body = routed.post("/generate", text="Hello", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    assert body["meta_info"]["completion_tokens"] == len(body["output_ids"]) == 5


@pytest.mark.parametrize(("path", "named"), [("/v1/rerank", {}), ("/rerank", {"model": MODEL, "top_k": 2})])
def test_ranks(routed: Routed, path: str, named: dict[str, Any]) -> None:
    results = routed.post(path, query="What is it?", documents=DOCUMENTS, **named)["results"]
    assert len(results) == named.get("top_k", 3)
    assert (results[0]["index"], results[0]["document"]) == (1, "What is it?")
    assert results[0]["score"] == pytest.approx(1)
    assert [one["score"] for one in results] == sorted((one["score"] for one in results), reverse=True)


def test_embeddings(routed: Routed) -> None:
    [entry] = routed.post("/v1/embeddings", model=MODEL, input="Hello")["data"]
    assert sum(value * value for value in entry["embedding"]) == pytest.approx(1)


def test_both_serve_and_one_goes_on_alone(routed: Routed) -> None:
    """Last, because it leaves one worker only. No request may notice."""
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    for _ in range(4):
        routed.post("/v1/chat/completions", **ask)
    served = [_accepted(one) for one in routed.workers]
    assert min(served) >= 2
    first, second = routed.workers
    first.process.kill()
    first.process.wait()
    for _ in range(6):
        routed.post("/v1/chat/completions", **ask)
    assert _accepted(second) == served[1] + 6


def _accepted(server: Served) -> int:
    """Requests that a server has taken, of its metrics, which are on by default."""
    page = httpx.get(f"{server.address}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=60).text
    [line] = [one for one in page.splitlines() if one.startswith("pegboard_requests_accepted_total")]
    return int(float(line.rpartition(" ")[2]))
