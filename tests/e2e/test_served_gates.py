"""Admission gates in a server: what a client sees of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["normal", "overlap"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "memory": {"max_total_tokens": 2048},
        "scheduler": {"loop": request.param},
        "gates": [{"use": "session", "max_waiting_turns": 4}, {"use": "drill", "timeout": 1.5}],
    }
    with (
        serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server,
        httpx.Client(base_url=server.address, timeout=60.0) as client,
    ):
        yield client


def generate(client: httpx.Client, tokens: int = 4, **params: Any) -> httpx.Response:
    body = {
        "input_ids": [3, 4, 5],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "params": params,
    }
    return client.post("/generate", json=body)


def test_a_slow_gate_and_none_give_the_same_answer(client: httpx.Client) -> None:
    slow = generate(client, drill={"act": "delay", "delay": 0.2, "hold": 0.1})
    assert slow.status_code == 200, slow.text
    assert slow.json()["output_ids"] == generate(client).json()["output_ids"]


@pytest.mark.parametrize(
    ("said", "status", "message"),
    [
        ({"drill": {"act": "fail", "delay": 0.1}}, 422, "failed, as asked"),
        ({"drill": {"act": "fail", "delay": 0}}, 422, "failed, as asked"),
        ({"drill": {"act": "never"}}, 504, "at the gate 'drill': something that never happens"),
        ({"drill": {"act": "raise"}}, 500, "the gate 'drill' failed"),
        ({"drill": "nonsense"}, 400, "params.drill"),
        ({"session": {"id": "x" * 257}}, 400, "1 to 256 characters"),
    ],
    ids=str,
)
def test_errors_say_what_and_where(client: httpx.Client, said: dict[str, Any], status: int, message: str) -> None:
    response = generate(client, **said)
    assert response.status_code == status, response.text
    assert message in response.text
    assert "error" in response.json()
    assert generate(client).status_code == 200


def test_turns_of_a_session_are_answered_in_turn(client: httpx.Client) -> None:
    """Too many at once: the first runs, four wait, the others are refused; whoever was taken is answered."""
    said = {"session": {"id": "s"}, "drill": {"act": "delay", "delay": 1.2}}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: generate(client, **said), range(8)))  # type: ignore[arg-type]
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 5 + [429] * 3
    outputs = [answer.json()["output_ids"] for answer in answers if answer.status_code == 200]
    assert all(one == outputs[0] for one in outputs)
    assert generate(client, **said).status_code == 200  # type: ignore[arg-type]


def test_a_blocked_client_that_leaves_makes_room(client: httpx.Client) -> None:
    said = {"session": {"id": "t"}, "drill": {"act": "delay", "delay": 0.3}}
    with ThreadPoolExecutor(2) as threads:
        leaving = threads.submit(lambda: client.post("/generate", timeout=0.15, json={"text": "a", "params": said}))
        with pytest.raises(httpx.ReadTimeout):
            leaving.result()
    assert generate(client, **said).status_code == 200  # type: ignore[arg-type]
