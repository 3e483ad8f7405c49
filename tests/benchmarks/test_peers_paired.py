"""Servers that take turns: what slows the machine for a while moves no ratio, and each is first as often."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import measure, paired
from benchmarks.peers.processes import Running, ServerError, reading
from benchmarks.peers.servers import BEFORE, OURS, Subject
from benchmarks.peers.workloads import Workload

MOODS = (1.0, 0.4, 0.9, 0.5, 1.0, 0.3)


class Streams(http.server.BaseHTTPRequestHandler):
    """Two routes: /endless, and /short, which ends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.wfile.flush()
        if self.path == "/endless":
            self.rfile.read(1)  # until the reader goes

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(("path", "wrong"), [("/endless", False), ("/short", True)])
def test_a_stream_is_read_until_the_end(path: str, wrong: bool, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        process = subprocess.Popen(["sleep", "100"])
        one = Running("ours", process, f"http://127.0.0.1:{server.server_port}", tmp_path / "log", 0.0)
        failing = pytest.raises(ServerError, match=rf"{path}: the stream ended") if wrong else contextlib.nullcontext()
        try:
            with failing, reading(one, path):
                time.sleep(1.0)
        finally:
            process.kill()
            process.wait()
            server.shutdown()


class Fake:
    def __init__(self, name: str) -> None:
        self.name = name

    def check(self) -> None:
        """It runs."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that slows down from round to round, and a server that is 3% quicker for 1% more of the processor."""
    found: list[str] = []

    @contextlib.contextmanager
    def started(plan: measure.Plan, subject: Subject, run: int) -> Iterator[Fake]:
        yield Fake(subject.name)

    def measured(plan: measure.Plan, server: Fake, workload: Workload, *, seed: int, record: object) -> dict[str, Any]:
        found.append(server.name)
        speed = MOODS[seed // 1000 - 1] * (1.03 if server.name == OURS.name else 1.0)
        cpu = 2.0 / MOODS[seed // 1000 - 1] * (1.01 if server.name == OURS.name else 1.0)
        return {"output_tokens": 100, "output_throughput": speed, "server_cpu_s": cpu}

    monkeypatch.setattr(measure, "started", started)
    monkeypatch.setattr(measure, "measured", measured)
    monkeypatch.setattr(paired, "first_answer", lambda *args: 1.0)
    return found


def test_ratios_are_those_within_a_round(asked: list[str], tmp_path: Path) -> None:
    before = Subject(BEFORE, 1.0, 1.0, (1.0, 1.0, 1.0))
    plan = measure.Plan([before, OURS], ["streams-1"], 1, tmp_path, tmp_path, tmp_path, say=lambda text: None)
    saved: list[list[dict[str, Any]]] = []
    found = paired.compare(plan, 5, lambda records: saved.append(list(records)))
    assert [len(one) for one in saved] == [1, 2, 3, 4, 5], "the round that warms up is not among them"
    assert asked[::2].count(BEFORE) == asked[1::2].count(BEFORE) == 3
    speed, cpu = (found[OURS.name][f"streams-1 {figure}"] for figure in ("speed", "cpu"))
    assert (speed.median, speed.low, speed.high) == pytest.approx((1.03, 1.03, 1.03))
    assert cpu.median == pytest.approx(1 / 1.01)
    assert "| streams-1 speed | 1.030 | 1.030 to 1.030 |" in paired.render(found, BEFORE)


def test_a_range_holds_what_rounds_say() -> None:
    values = [1.0] * 8 + [0.5, 2.0]
    records = [
        {"workload": "w", "subjects": {"a": {"speed": 1.0, "cpu": 1.0}, "b": {"speed": one, "cpu": one}}}
        for one in values
    ]
    found = paired.ratios(records, "a", "b")["w speed"]
    assert found == paired.Ratio(1.0, 1.0, 1.0), "single rounds move no median"
    spread = paired.ratios([*records[:3], *records[8:]], "a", "b")["w speed"]
    assert spread.low < 1.0 < spread.high


def test_there_must_be_something_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.arguments(["pair"])
    assert "--against, --variant or --reading" in capsys.readouterr().err


def test_a_load_tool_that_fails_ends_it(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: object, record: dict[str, Any], **named: object) -> None:
        record["failures"] = ["streams-1: it said so"]

    monkeypatch.setattr(measure, "measured", measured)
    plan = measure.Plan([OURS, OURS], ["streams-1"], 1, tmp_path, tmp_path, tmp_path, say=lambda text: None)
    with pytest.raises(measure.LoadError, match="it said so"):
        paired.compare(plan, 1, lambda records: None)
