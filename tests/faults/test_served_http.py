"""What was reported of other servers' HTTP surface, by the number of the report, against a server with a tiny model.

Elsewhere: routes and keys in test_routes_and_keys.py, pickle in test_nothing_is_unpickled.py, slow and large requests
in tests/plugins/http_guard/test_protocol.py, signals, kills and crowds in test_served_faults.py.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from tests.faults.whole_api import EVERY_API

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 60.0
CONTEXT = 512
ENDLESS = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    config = {
        "model": {"path": str(model), "dtype": "float32", "context_length": CONTEXT, "served_name": "tiny"},
        "memory": {"max_total_tokens": 8192},
        "attention": {"use": "torch"},
        "apis": list(EVERY_API),
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as one:
        yield one
        assert "Traceback" not in one.log(), one.log()


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=PATIENCE) as one:
        yield one


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def state(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/server_info").json()["scheduler"])


def works(client: httpx.Client) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    assert client.post("/generate", json=body).json()["meta_info"]["completion_tokens"] == 3


def message(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


# ---- 2. the context --------------------------------------------------------------------------------------------------

OF_IDS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "/generate": lambda ids: {"input_ids": ids, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}},
    "/v1/completions": lambda ids: {"prompt": ids, "max_tokens": 9, "ignore_eos": True},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OF_IDS)
def test_3910_9599_the_context_to_the_token(client: httpx.Client, path: str, stream: bool) -> None:
    """The longest prompt that leaves room for one token, and one more."""
    for length, fits in ((CONTEXT - 1, True), (CONTEXT, False), (CONTEXT + 1, False)):
        answer = client.post(path, json={**OF_IDS[path]([5] * length), "stream": stream})
        if fits:
            assert answer.status_code == 200, answer.text
            assert '"length"' in answer.text
        else:
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(CONTEXT) in error["message"]
            assert str(length) in error["message"]
    works(client)


TOO_LONG: dict[str, dict[str, Any]] = {
    "/generate": {"text": "word " * 2000},
    "/v1/completions": {"prompt": "word " * 2000},
    "/v1/chat/completions": {"messages": [message("word " * 2000)]},
    "/v1/responses": {"input": "word " * 2000},
    "/v1/embeddings": {"input": "word " * 2000},
    "/v1/messages": {"model": "tiny", "messages": [message("word " * 2000)], "max_tokens": 5},
}


@pytest.mark.parametrize("path", TOO_LONG)
def test_llama_cpp_3817_texts_far_beyond_the_context(client: httpx.Client, path: str) -> None:
    for factor in (1, 50):
        text = json.dumps(TOO_LONG[path]).replace("word ", "word " * factor)
        answer = client.post(path, content=text)
        assert answer.status_code == 400, answer.text
        assert "context" in answer.text or "too long" in answer.text
    works(client)


# ---- 5. clients that leave -------------------------------------------------------------------------------------------

LONG: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True}},
    "/v1/completions": {"prompt": "hi", "max_tokens": ENDLESS, "ignore_eos": True, "n": 3},
    "/v1/chat/completions": {"messages": [message("hi")], "max_tokens": ENDLESS, "ignore_eos": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": ENDLESS, "ignore_eos": True},
    "/v1/messages": {"model": "tiny", "messages": [message("hi")], "max_tokens": ENDLESS, "ignore_eos": True},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LONG)
def test_34894_35255_who_leaves_is_aborted(client: httpx.Client, server: Served, path: str, stream: bool) -> None:
    """On a busy machine a request may end before this test sees it run; then it tries again."""
    body = json.dumps({**LONG[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = server.address.removeprefix("http://").split(":")

    def aborted_by_leaving() -> int:
        before = state(client)
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(head.encode() + body)
            wait_for(lambda: state(client)["generated_tokens"] > before["generated_tokens"])
        wait_for(lambda: state(client)["running_requests"] + state(client)["waiting_requests"] == 0)
        return int(state(client)["aborted"]) - int(before["aborted"])

    assert LONG[path].get("n", 1) in (aborted_by_leaving() for _ in range(20)), "it ran to its end each time"


# ---- 9. memory -------------------------------------------------------------------------------------------------------


def test_6914_memory_stays_where_it_was(client: httpx.Client, server: Served) -> None:
    """Requests of every kind, good and bad, each new to the server: what it keeps of them is bounded."""

    def rounds(numbers: range) -> None:
        for number in numbers:
            filler = f"{number}-" * 200
            client.get(f"/nowhere/{number}", headers={"x-request-id": f"r{number}", f"x-{number}": filler})
            client.get(f"/v1/models/{filler[:200]}")
            one = {"text": filler[:300], "rid": f"rid-{number}", "sampling_params": {"max_new_tokens": 1}}
            client.post("/generate", json=one)
            client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "cache_salt": filler, filler: filler})
            client.post("/v1/chat/completions", json={"messages": [message(filler)], "max_tokens": 0})
            client.post("/v1/messages", content=b"{" + filler.encode() * 50)
            client.post("/abort_request", json={"rid": filler[:200]})

    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    rounds(range(40))
    before = [one.memory_info().rss for one in processes]
    rounds(range(40, 160))
    grown = {
        " ".join(one.cmdline()[-2:]): one.memory_info().rss - then for one, then in zip(processes, before, strict=True)
    }
    assert max(grown.values()) < 4 * 2**20, grown


# ---- who can connect -------------------------------------------------------------------------------------------------


def test_cve_2025_30202_one_port_on_loopback(server: Served) -> None:
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    found = {c.laddr for one in family for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {(address.ip, address.port) for address in found} == {("127.0.0.1", int(server.address.rpartition(":")[2]))}


# ---- tensors ---------------------------------------------------------------------------------------------------------


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.file,)


def payload(file: Path) -> str:
    import torch

    out = io.BytesIO()
    torch.save(Trap(file), out)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/generate", "input_embeds"),
        ("/generate", "image_data"),
        ("/v1/completions", "prompt_embeds"),
        ("/v1/completions", "prompt"),
        ("/encode", "input_embeds"),
        ("/v1/embeddings", "input"),
    ],
)
def test_cve_2025_62164_tensors_of_clients_are_not_loaded(
    client: httpx.Client, tmp_path: Path, path: str, field: str
) -> None:
    trap = tmp_path / "trap"
    good = {"/generate": {"text": "hi"}, "/encode": {"text": "hi"}, "/v1/embeddings": {"input": "hi"}}
    for value in (payload(trap), [[0.5] * 8], [[0.5], [[1.0]]], {"indices": [[0, 99999]], "values": [1.0]}, "AAAA"):
        answer = client.post(path, json={**good.get(path, {"prompt": "hi", "max_tokens": 1}), field: value})
        assert answer.status_code in (200, 400), answer.text
        if field in ("input_embeds", "image_data"):
            assert answer.status_code == 400, "nothing takes tensors here"
    assert not trap.exists()
    works(client)


# ---- how much a request may ask for ----------------------------------------------------------------------------------

HUGE = 10**9
MUCH: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "hi", "sampling_params": {"n": HUGE}}, "n"),
    ("/generate", {"text": ["hi"] * 100_000}, "prompts"),
    ("/generate", {"text": ["hi"] * 500, "sampling_params": {"n": 500}}, "prompts"),
    ("/generate", {"text": "hi", "return_logprob": True, "top_logprobs_num": HUGE}, "logprobs"),
    ("/generate", {"text": "hi", "return_logprob": True, "token_ids_logprob": [5] * 100_000}, "token_ids_logprob"),
    ("/generate", {"text": "hi", "sampling_params": {"stop": ["x" * 100_000] * 100}}, "stop"),
    ("/generate", {"text": "hi", "sampling_params": {"stop_token_ids": [5] * 100_000}}, "stop_token_ids"),
    ("/generate", {"text": "hi", "rid": "r" * 100_000}, "rid"),
    ("/generate", {"text": "hi", "cache_salt": "s" * 100_000}, "cache_salt"),
    ("/generate", {"text": "hi", "priority": 2**40}, "priority"),
    ("/v1/completions", {"prompt": "hi", "n": HUGE}, "n"),
    ("/v1/completions", {"prompt": "hi", "logprobs": HUGE}, "logprobs"),
    ("/v1/completions", {"prompt": ["hi"] * 100_000}, "prompt"),
    ("/v1/completions", {"prompt": "hi", "logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    ("/v1/completions", {"prompt": "hi", "stop": [str(i) for i in range(100_000)]}, "stop"),
    ("/v1/chat/completions", {"messages": [message("hi")], "n": HUGE}, "n"),
    ("/v1/chat/completions", {"messages": [message("hi")], "logprobs": True, "top_logprobs": HUGE}, "top_logprobs"),
    ("/v1/embeddings", {"input": ["hi"] * 100_000}, "input"),
    ("/v1/embeddings", {"input": "hi", "dimensions": HUGE}, "dimensions"),
    ("/v1/rerank", {"query": "hi", "documents": ["hi"] * 100_000}, "documents"),
    ("/v1/score", {"text_1": ["hi"] * 100_000, "text_2": "ho"}, "text_1"),
    (
        "/v1/messages",
        {"model": "tiny", "messages": [message("hi")], "max_tokens": 5, "stop_sequences": ["x"] * 100_000},
        "stop_sequences",
    ),
]


@pytest.mark.parametrize("case", MUCH, ids=[f"{path}-{field}-{i}" for i, (path, _, field) in enumerate(MUCH)])
def test_cve_2026_34756_requests_for_too_much(client: httpx.Client, case: tuple[str, dict[str, Any], str]) -> None:
    path, body, field = case
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text[:500]
    assert field in answer.text
    assert len(answer.content) < 2000, "an error does not repeat what was too much"
    works(client)


def test_cve_2025_48956_headers_without_end(client: httpx.Client, server: Served) -> None:
    answer = client.get("/health", headers={f"x-{i}": "y" for i in range(1000)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):
        # Cut off in the middle; whether the answer is still read is up to the network.
        assert client.get("/health", headers={"x": "y" * 20 * 2**20}).status_code == 431
    works(client)


def test_bodies_without_end(client: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(10_000):
            yield b"x" * 65536

    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        assert client.post("/generate", content=endless()).status_code == 413
    works(client)


# ---- the prefix cache as a side channel ------------------------------------------------------------------------------


def cached(answer: dict[str, Any]) -> int:
    """How many tokens of the prompt were cached, wherever an API says so."""
    usage = answer.get("usage", answer.get("meta_info", {}))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details.get("cached_tokens", details.get("cache_read_input_tokens", -1)))


PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"messages": [message(text)], "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/v1/messages": lambda text: {"model": "tiny", "messages": [message(text)], "max_tokens": 1},
}


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("path", PROBES)
def test_cve_2025_46570_nobody_learns_what_others_asked(client: httpx.Client, path: str, name: str) -> None:
    """With a salt, a prompt is as slow for everybody else as one that nobody has asked: their KV is not shared."""
    text = f"{path} {name} is what a secret is about: " + "the quick brown fox jumps over it " * 3

    def ask(**more: Any) -> int:
        answer = client.post(path, json={**PROBES[path](text), **more})
        assert answer.status_code == 200, answer.text
        found = cached(answer.json())
        assert found >= 0, f"{path} does not say how much was cached: {answer.text}"
        return found

    alice, eve, bob = (f"{who} of {path} and {name}" for who in ("alice", "eve", "bob"))
    assert ask(**{name: alice}) == 0
    own = ask(**{name: alice})
    assert own > len(text) // 4, "she has no use of the cache herself"
    assert ask(**{name: eve}) == 0
    # Without a salt there is what a template begins with, which is everybody's.
    assert ask() < own // 2, "who has no salt learns it"
    assert ask() == own
    assert ask(**{name: bob}) == 0, "what was asked without a salt is nobody's with one"
