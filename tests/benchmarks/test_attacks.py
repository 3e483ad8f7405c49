"""What benchmarks/attacks.py counts as lost, and how its figures are said."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.hostile import clients, measure, media, payloads, report
from benchmarks.hostile.attacks import ATTACKS

ROOT = Path(__file__).resolve().parents[2]


def stream(*events: dict[str, Any], done: bool = True, status: int = 200) -> clients._Stream:
    found = clients._Stream(clients.Streams(clients.Address.parse("127.0.0.1:1"), 1))  # type: ignore[attr-defined]
    found.head(status, {})
    for number, event in enumerate([*events, *(["[DONE]"] if done else [])]):
        data = event if isinstance(event, str) else json.dumps(event)
        found.body(f"data: {data}\n\n".encode(), found.touched + number)
    return found


def native(sent: int, counted: int, reason: str | None = "length") -> dict[str, Any]:
    meta = {"completion_tokens": counted, "finish_reason": {"type": reason} if reason else None}
    return {"text": "a" * sent, "output_ids": [5] * sent, "meta_info": meta}


def test_a_token_that_is_counted_and_not_sent_is_lost() -> None:
    ended = [
        clients._end_of(stream(native(1, 1, None), native(2, 2)), native=True),
        clients._end_of(stream(native(1, 1, None), native(224, 225)), native=True),
    ]
    assert [one["outcome"] for one in ended] == ["200", "200"]
    found = measure._ends({"ended": ended})
    assert (found["lost_tokens"], found["counted_tokens"]) == (1, 227)


def test_streams_without_a_proper_end() -> None:
    broken: list[clients._Stream] = [
        stream(native(2, 2, None), done=False),
        stream(native(2, 2, None), {"error": {"code": "engine_failed"}}),
        stream(native(2, 2, "abort")),
    ]
    outcomes = [clients._end_of(one, native=True)["outcome"] for one in broken]
    assert outcomes[:2] == ["no end", "error engine_failed"]
    assert outcomes[2].startswith("ended: ")
    assert clients._end_of(stream({"choices": []}), native=False)["outcome"] == "no end"


def test_a_client_without_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the server that did not answer."""

    async def fails(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "open_connection", fails)
    attacker = clients.Attacker(clients.Address.parse("127.0.0.1:1"), ATTACKS["idle"], 0, 1.0)  # type: ignore[attr-defined]
    assert asyncio.run(attacker._opened(0.0)).startswith("not sent")


def test_clients_may_open_as_many_files_as_there_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        clients.allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_refusal_is_said_by_its_code() -> None:
    answer = clients.Answer()
    answer.head(503, {})
    answer.body(b'{"error": {"code": "queue_full", "message": "..."}}', 0.0)
    assert answer.outcome == "503 queue_full"


def test_figures_of_a_time() -> None:
    seen = {
        "health": {"asked": [(0.5, 9.0, 200), (1.0, 0.25, 200), (1.5, 0.5, 503), (2.0, 1.0, clients.OPEN)]},
        "streams": {"gaps": [(0.5, 9.0), (1.5, 0.125)], "firsts": [(1.5, 2.0)], "silent": [1.5], "waiting": [2.5]},
    }
    found = measure._honest(seen, 1.0, 3.0, last=True)
    assert found["health_s"] == {"p50": 0.5, "p99": 0.5, "max": 1.0}
    assert (found["health_failed"], found["health_open"]) == (1, 1)
    assert found["gap_s"]["max"] == 0.125
    assert found["silence_s"] == 1.5, "a stream that has been silent until the end"
    assert found["first_s"]["max"] == 2.5, "one that has had nothing by then"
    assert measure._honest(seen, 1.0, 2.0)["silence_s"] == 0.125


def record(subject: str, p99: float) -> dict[str, Any]:
    honest = {
        "health_s": {"p50": 0.001, "p99": p99, "max": p99},
        "health_failed": 0,
        "health_open": 0,
        "gap_s": {"p50": 0.01, "p99": 0.02, "max": 0.03},
        "first_s": {},
        "silence_s": 0.03,
        "events_per_s": 9.0,
        "streams": {"200": 8},
        "lost_tokens": 1,
        "counted_tokens": 100,
    }
    return {
        "attack_name": "stops",
        "subject": subject,
        "quiet": honest,
        "attacked": honest,
        "attack": {"sent": 4, "outcomes": {"400 too_much": 4}, "unanswered": 0, "slowest_s": 0.1},
        "memory": {"quiet": {}, "peak": {"api": 2**27, "scheduler": 2**30}},
        "restarts": 0,
        "scheduler": {},
        "lag_s": 0.0,
        "stop": {"seconds": 1.0, "code": 0, "in_time": True},
    }


def test_before_and_after_stand_in_one_row() -> None:
    said = report.table([record("before", 12.5), record("after", 0.004)])
    (row,) = [line for line in said.splitlines() if line.startswith("| stops")]
    assert "1 / 12,500 / 12,500 → 1 / 4 / 4" in row
    assert "128 → 128" in row
    assert "4 of 4 → 4 of 4" in row
    assert "400 too_much: 4" in "\n".join(report.details(record("after", 1.0)))


SLOW = {
    "bodies", "long_text", "queue_ids", "queue_batches",
    "picture_scans", "picture_chunks", "body_escapes", "body_line_ends",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - SLOW))
def test_what_attacks_send(name: str) -> None:
    """Of those that are built soon."""
    asks = [one for scale in (1.0, clients.SMALLEST) for one in ATTACKS[name].asks(random.Random(1), scale)]
    assert bool(asks) != bool(ATTACKS[name].idle)
    for one in asks:
        assert one.path.startswith("/")
        json.loads(one.body)


def test_bodies_are_as_large_as_they_are_asked_to_be() -> None:
    for one in payloads.bodies(4096).values():
        assert 4090 <= len(one.body) <= 4096
    for name, text in payloads.long_texts(random.Random(1), 5000).items():
        assert len(text) == 5000, name


def test_pictures_are_what_they_should_be() -> None:
    """Those of a client beside, and small ones of the attacks'."""
    found = []
    for one in (media.honest(random.Random(1)), media.scans(64, 3), media.many_pixels(1200), media.many_chunks(5)):
        body = json.loads(one.body)
        assert body["max_tokens"] == 4
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        picture.load()
        found.append((picture.format, picture.mode, picture.size))
    rgb = ("PNG", "RGB", (64, 64))
    assert found == [rgb, ("JPEG", "L", (64, 64)), ("PNG", "RGBA", (1200, 1200)), rgb]
    for one in (media.escapes(6000), media.line_ends(6000)):
        assert json.loads(one.body)["max_tokens"] == 2
        assert 6000 <= len(one.body) <= 6300


def test_a_client_beside_is_told_of_before_and_during() -> None:
    attacked = {"seconds": {"p50": 0.1, "max": 2.0}, "outcomes": {"200": 3, "503 busy": 1}}
    beside = {"quiet": {"seconds": {"p50": 0.05, "max": 0.06}, "outcomes": {"200": 9}}, "attacked": attacked}
    one = {**record("this", 0.1), "attack_name": "picture_scans", "beside": beside}
    assert "pictures: 50 / 60 to 100 / 2,000 (1 failed)" in report.table([one])
    assert "client beside, attacked: {'200': 3, '503 busy': 1}" in "\n".join(report.details(one))


def test_it_runs_by_its_path() -> None:
    command = [sys.executable, "benchmarks/attacks.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--against" in done.stdout


def test_a_stream_is_silent_from_its_first_token_on() -> None:
    """The event that says who speaks in a chat comes before its turn does."""
    streams = clients.Streams(clients.Address.parse("127.0.0.1:1"), 1)  # type: ignore[attr-defined]
    stream = clients._Stream(streams)
    stream.head(200, {})
    began = stream.sent
    said = [b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', b'{"choices":[{"delta":{"content":"a"}}]}']
    for at, event in ((1.0, said[0]), (5.0, said[1]), (5.5, said[1])):
        stream.body(b"data: " + event + b"\n\n", began + at)
    assert [seconds for _, seconds in streams.firsts] == pytest.approx([5.0])
    assert [seconds for _, seconds in streams.gaps] == pytest.approx([0.5])
