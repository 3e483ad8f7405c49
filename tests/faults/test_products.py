"""Products of fields: each alone is within its bound, and two of them together must not be worth more than one request.

Every pair of size-like fields of every generating route, both at their bounds, is answered or refused by name. The API
process stays small, and /health, asked all the while from a process of its own, answers.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.hostile.clients import OPEN
from benchmarks.hostile.measure import Client, Memory
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from tests.faults.products import CONTEXT, MANY, ROUTES, Body

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE = 60.0
API_BYTES = 400 * 10**6
HEALTH_S = 5.0
"""What only a loop that is held up needs; a probe on a busy machine needs a tenth of it."""
STREAM_ENDS = ("message_stop", "response.completed", "response.incomplete", "response.failed", "error")
ANSWERED = {
    "generate": 100,
    "encode": 4,
    "chat": 75,
    "completions": 90,
    "responses": 75,
    "embeddings": 4,
    "score": 4,
    "labels": 5,
    "rerank": 4,
    "tokenize": 1,
    "detokenize": 1,
    "messages": 60,
    "count_tokens": 1,
}
"""How many of a route's pairs are answered at least, and not refused: about four in five of those that are."""
LONG = 2.0
"""Seconds after which the client of many long answers leaves."""
ASKS = 10
"""Answers of /health that are looked at together."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32", "context_length": CONTEXT, "served_name": "tiny"},
        "memory": {"max_total_tokens": 65536},
        "attention": {"use": "torch"},
        "logits_processors": ["penalties", "logit_bias", "min_new_tokens", "bad_words"],
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as one:
        yield one
        assert "Traceback" not in one.log(), one.log()[-5000:]


@dataclass(frozen=True, slots=True)
class Asked:
    """One pair, when it was asked, and what is wrong with its answer."""

    name: str
    start: float
    end: float
    wrong: str
    answered: bool
    """Or refused."""


def judge(answer: httpx.Response) -> tuple[str, bool]:
    """What is wrong with an answer, "" where nothing is; and whether it is one, and no refusal."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return judge_stream(answer.text)
    if answer.status_code != 200:
        return judge_refusal(answer), False
    body = answer.json()
    failed = isinstance(body, dict) and body.get("error")
    return (f"200 with an error: {answer.text[:300]}", False) if failed else ("", True)


def judge_refusal(answer: httpx.Response) -> str:
    said = answer.text[:300]
    if answer.status_code not in (400, 413, 429, 503):
        return f"{answer.status_code}: {said}"
    error = answer.json()["error"]
    named = error.get("code") or error.get("type")
    return "" if named and error["message"] else f"{answer.status_code} without a code or a message: {said}"


def judge_stream(said: str) -> tuple[str, bool]:
    """The same of a stream: it has an end, or an error with a name."""
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
    last = events[-1] if events else ""
    if last != "[DONE]" and not any(f'"type":"{end}"' in last for end in STREAM_ENDS):
        return f"a stream without an end: {said[-300:]}", False
    errors = [error for one in events[-2:] if one != "[DONE]" and (error := json.loads(one).get("error"))]
    named = all((error.get("code") or error.get("type")) and error["message"] for error in errors)
    return "" if named else f"a stream with an error without a name: {said[-300:]}", not errors


def ask(client: httpx.Client, path: str, names: Sequence[str], body: dict[str, Any]) -> Asked:
    """Many answers of many tokens are an honest request: it is enough that they have been taken."""
    content = json.dumps(body, separators=(",", ":")).encode()
    long = "tokens" in names and not MANY.isdisjoint({*names} - {"tokens"})
    before = accepted(client) if long else 0
    start = time.perf_counter()
    try:
        headers = {"content-type": "application/json"}
        wrong, answered = judge(client.post(path, content=content, headers=headers, timeout=LONG if long else PATIENCE))
    except httpx.ReadTimeout:
        answered = long and accepted(client) > before
        wrong = "" if answered else "no answer"
    except httpx.HTTPError as error:
        wrong, answered = f"no answer: {error!r}", False
    end = time.perf_counter()
    logger.info("%s %s: %.2f s %s", path, names, end - start, wrong or ("answered" if answered else "refused"))
    return Asked(f"{path} {' x '.join(names)}", start, end, wrong, answered)


def accepted(client: httpx.Client) -> int:
    """How many requests the scheduler has taken so far."""
    return int(client.get("/server_info").json()["scheduler"]["accepted"])


@pytest.mark.parametrize("name", ROUTES)
def test_pairs_of_fields_at_their_bounds(server: Served, name: str) -> None:
    route = ROUTES[name]
    assert check(server, route.path, [*route.pairs(quick=True)]) >= ANSWERED[name]


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if any(route.largest())])
def test_pairs_that_have_hurt_in_the_largest_bodies(server: Served, name: str) -> None:
    route = ROUTES[name]
    check(server, route.path, [*route.largest()])


@pytest.mark.full
@pytest.mark.parametrize("name", ROUTES)
def test_every_pair_of_fields_at_its_bounds(server: Served, name: str) -> None:
    route = ROUTES[name]
    assert check(server, route.path, [*route.pairs()]) >= ANSWERED[name]


def check(server: Served, path: str, pairs: Sequence[tuple[Sequence[str], Body]]) -> int:
    """Ask for these pairs, beside /health, and judge. How many are answered."""
    with (
        Client("health", server.address) as health,
        Memory(psutil.Process(server.process.pid)) as memory,
        httpx.Client(base_url=server.address, timeout=PATIENCE) as client,
    ):
        health.wait_ready()
        health.tell()
        asked = [ask(client, path, names, body) for names, body in pairs]
        seen = health.result()["asked"]
        largest = memory.peaks()["api"]
        state = client.get("/server_info").json()["scheduler"]
    problems = [f"{one.name}: {one.wrong}" for one in asked if one.wrong]
    problems += [f"/health answered {status}" for *_, status in seen if status not in (200, OPEN)]
    for one in asked:
        if (delay := health_beside(seen, one)) > HEALTH_S:
            problems.append(f"{one.name}: /health took {delay:.1f} s, the median of {ASKS}")
    if largest > API_BYTES:
        problems.append(f"the API process had {largest / 1e6:.0f} MB")
    problems += [f"{name}: {state[name]}" for name in ("book_errors", "failed_batches") if state[name]]
    answered = sum(one.answered for one in asked)
    logger.info("%s: %d of %d answered", path, answered, len(asked))
    assert not problems, "\n".join(problems)
    return answered


def health_beside(seen: list[tuple[float, float, int]], one: Asked) -> float:
    """The median of what /health took that was asked while a pair was: the slowest ten of these, or all."""
    beside = sorted((seconds for at, seconds, _ in seen if one.start <= at <= one.end), reverse=True)
    return statistics.median(beside[:ASKS]) if len(beside) >= ASKS else 0.0
