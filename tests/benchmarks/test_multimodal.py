"""benchmarks/multimodal: that it compares what it says, and what it makes of what it saw. Its figures are no test's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi import FastAPI

from benchmarks.multimodal import again, interference, report, text, transport
from benchmarks.multimodal.again import ENCODING, NEW, PREFIX, Shown
from benchmarks.multimodal.interference import PICTURES, TEXTS, Round, gaps_of, pace_of, without_decodes
from benchmarks.multimodal.load import shown
from benchmarks.multimodal.models import seeing_model, text_tower
from benchmarks.multimodal.served import LOOP, Late, LoopWatch, Step, StepLog, Watched
from benchmarks.multimodal.text import BEFORE, SEEING, TOWER, Speed
from pegboard.conformance.model_family.base import assert_close
from pegboard.core.pipeline.counters import Counters
from pegboard.tools.bench.images import ImageSize
from pegboard.tools.bench.records import Record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("models"), "tiny")


def test_the_text_tower_alone_computes_the_same(seeing: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    tower = AutoModelForCausalLM.from_pretrained(text_tower(seeing, tmp_path))
    assert type(tower).__name__ == "Qwen3ForCausalLM"
    whole = AutoModelForImageTextToText.from_pretrained(seeing)
    ids = torch.from_numpy(np.random.default_rng(0).integers(40, 360, (1, 50)))
    with torch.inference_mode():
        assert_close(tower(ids).logits[0], whole(ids).logits[0])


def test_both_ways_bring_the_same_patches(seeing: Path, tmp_path: Path) -> None:
    """A picture of 64 x 96 in uint8, and twice its numbers in float32; the measurement itself compares them."""
    found = transport.measure(tmp_path, "tiny", [ImageSize(64, 96)], times=1)["64x96"]
    assert found["bytes"]["file"] == pytest.approx(64 * 96 * 3, abs=100)
    assert found["bytes"]["message"] == pytest.approx(64 * 96 * 3 * 2 * 4, abs=100)
    assert not [one for one in tmp_path.iterdir() if one.name == "picture"]
    sent = transport.Transport(seeing, tmp_path / "..")
    patches, _ = sent.by_file(np.zeros((64, 96, 3), np.uint8))
    sent.close()
    assert patches.shape == (4 * 6, 3 * 2 * 16 * 16)


def test_gaps_between_tokens() -> None:
    records = [Record(0, times=[1.0, 2.0, 2.0, 5.0, 9.0], counts=[1, 2, 1, 1, 1]), Record(1, times=[1.5, 4.0])]
    assert gaps_of(records, 2.0, 6.0) == [(1.0, 3), (3.0, 1), (2.5, 1)]


def test_the_pace_of_tokens_that_were_read_together() -> None:
    assert pace_of([Record(0, sent=1.0, times=[3.0] * 4, end=3.0, output_tokens=4)]) == 0.5


def test_steps_without_decodes_are_counted_in_a_row() -> None:
    kinds = [("decode", 8), ("piece", 0), ("chunk", 9), ("piece", 0), ("chunk", 1), ("decode", 8), ("piece", 0)]
    assert without_decodes([Step(0.0, kind, 0.1, tokens) for kind, tokens in kinds], 8) == 2
    assert without_decodes([], 8) == 0


def a_round(kind: str, piece: float, step: float) -> Round:
    """Tokens every `step` seconds, with a gap of a piece, a chunk of 0.05 s and a step in between."""
    gaps = [(step, 1)] * 10 + [(piece + 0.05 + step, 1)]
    steps = [
        Step(1.0, "decode", step, 8),
        Step(1.0 + piece, "piece", piece, 0),
        Step(1.05 + piece, "chunk", 0.05, 1),
        Step(1.05 + piece + step, "decode", step, 8),
    ]
    return Round(kind, gaps, [0.3], [Late(1.0, 0.004, 0.001), Late(2.0, 0.003, 0.002)], steps, 8)


def test_figures_of_streams() -> None:
    found = a_round(PICTURES, 0.2, 0.01).figures()
    assert found["itl_ms"] == pytest.approx(10)
    assert found["gap_ms"] == found["scheduler_gap_ms"] == pytest.approx(260)
    # What the longest gap has beyond the piece: the chunk and the decode that follow it.
    assert found["beyond_ms"] == pytest.approx(60)
    assert (found["in_a_row"], found["piece_ms"], found["chunk_ms"]) == (2, pytest.approx(200), pytest.approx(50))
    assert (found["late_ms"], found["late_computing_ms"]) == (pytest.approx(4), pytest.approx(2))
    rounds = [a_round(PICTURES, 0.2, 0.011), a_round(TEXTS, 0.0, 0.01), a_round(TEXTS, 0.0, 0.01)]
    rounds.append(a_round(PICTURES, 0.3, 0.013))
    both = interference.report([one.figures() for one in rounds])
    assert both["itl_ratio"] == {"median": pytest.approx(1.2), "min": pytest.approx(1.1), "max": pytest.approx(1.3)}
    assert (both[PICTURES]["gap_ms"], both[TEXTS]["gap_ms"]) == (pytest.approx(363), pytest.approx(60))
    assert "1.200 (1.100 to 1.300)" in report.table("streams", both)


def test_tokens_that_came_together_share_the_time_before_them() -> None:
    """Nine of ten tokens come in threes."""
    found = replace(a_round(PICTURES, 0.1, 0.01), gaps=[(0.03, 3)] * 3 + [(0.02, 1)]).figures()
    assert (found["itl_ms"], found["gap_ms"]) == (pytest.approx(10), pytest.approx(30))


def test_figures_of_pictures_seen_before() -> None:
    seen = [Shown(NEW, 0.8, 0.4, 0.3), Shown(NEW, 1.0, 0.5, 0.5), Shown(NEW, 1.2, 0.6, 0.6)]
    seen += [Shown(PREFIX, 0.1, 0.0, 0.02), Shown(ENCODING, 0.5, 0.0, 0.4)]
    found = again.report(seen)
    assert found["encoding_share"] == pytest.approx(0.5)
    assert found["prefix cached, times lower"] == {"median": 10, "min": pytest.approx(8), "max": pytest.approx(12)}
    assert found["encoding cached, times lower"]["median"] == pytest.approx(2)
    said = report.table("again", {**found, "vision_layers": 4})
    assert "| times lower with the encoding cached | 2.00 (1.60 to 2.40) | 2 |" in said


def test_figures_of_text() -> None:
    rounds = [
        {SEEING: Speed(99.0, 2.0), TOWER: Speed(100.0, 1.0), BEFORE: Speed(50.0, 4.0)},
        {SEEING: Speed(50.0, 1.0), TOWER: Speed(50.0, 1.0), BEFORE: Speed(50.0, 1.0)},
    ]
    found = text.report(rounds, {SEEING: ["a", "b"], TOWER: ["a", "b"], BEFORE: ["a", "c"]})
    assert found["to_tower"] == {"median": pytest.approx(0.995), "min": pytest.approx(0.99), "max": 1}
    assert (found["to_before"]["max"], found["to_tower_cpu"]["max"]) == (2, 2)
    assert found["same_answers"] is False
    assert "| all give the same answers | NO | yes |" in report.table("text", found)


def test_a_step_log_tells_steps_apart() -> None:
    counters, lines = Counters(), list[str]()
    told = {"encode_steps": 0, "encode_time": 0.0}
    log = StepLog(counters, lambda: told, lines.append)
    log()
    told |= {"encode_steps": 1, "encode_time": 0.25}
    log()
    counters.prefill_steps, counters.forward_time, counters.schedule_time, counters.generated_tokens = 1, 0.5, 0.125, 9
    log()
    counters.decode_steps, counters.forward_time, counters.generated_tokens = 1, 0.75, 17
    log()
    assert [line.split()[1:] for line in lines] == [
        ["piece", "0.25", "0"],
        ["chunk", "0.625", "9"],
        ["decode", "0.25", "8"],
    ]


def test_what_a_server_is_still_writing_is_left_out(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "loop", tmp_path / "steps")
    assert not watched.in_order(0, 10)
    assert not watched.late(0, 10)
    watched.steps.write_text("1.0 piece 0.5 0\n2.0 decode 0.1 8\n3.0 chunk 0.2 9\n4.0 chu")
    assert watched.in_order(1.5, 3.5) == [Step(2.0, "decode", 0.1, 8), Step(3.0, "chunk", 0.2, 9)]
    watched.loop.write_text("1.0 0.005 0.001\n2.0 0.0")
    assert watched.late(0, 10) == [Late(1.0, 0.005, 0.001)]


def test_an_event_loop_that_is_held_up_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path / "loop", tmp_path / "steps")
    monkeypatch.setenv(LOOP, str(watched.loop))

    async def scene() -> None:
        watch = LoopWatch()
        watch.register_routes(FastAPI())
        await asyncio.sleep(0.02)
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        await asyncio.sleep(0.02)

    start = time.perf_counter()
    asyncio.run(scene())
    worst = max(watched.late(start, time.perf_counter()), key=lambda one: one.computing)
    assert worst.computing >= 0.05
    assert worst.late >= 0.04


def test_a_prompt_that_shows_a_picture() -> None:
    (prompt,) = shown({"image_url": {"url": "data:,x"}}, "What?", "Look: ")
    assert prompt["text"] == "Look: <|vision_start|><|image_pad|><|vision_end|>What?"
    assert prompt["image_data"] == ["data:,x"]


@pytest.mark.full
def test_all_of_it_runs(tmp_path: Path) -> None:
    """With tiny models: servers start, answers are the same, caches give what each part says of them."""
    file = tmp_path / "found.json"
    words = ["--quick", "--rounds", "1", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.multimodal", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text("utf-8"))
    assert found["text"]["same_answers"]
    assert found["streams"][PICTURES]["piece_ms"] > 0
    assert found["again"]["vision_layers"] == 2
    assert done.stdout.count("| measured | aim |") == 4
