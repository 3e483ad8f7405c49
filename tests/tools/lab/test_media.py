"""Media in the lab: what encoding costs in virtual time, and what its cache and its steps' size are worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.errors import ConfigError
from pegboard.tools.lab.assemble import resolve
from pegboard.tools.lab.cost import CostModel, load_cost
from pegboard.tools.lab.report import ROWS, TIERS, summarise, table
from pegboard.tools.lab.run import Outcome, Simulation
from pegboard.tools.lab.workloads import WorkloadChoice

COST = CostModel(base=0.01, per_token=0.0001, encode_base=0.002, encode_per_token=0.0002, encoded_token_bytes=100)


def simulate(
    workload: str, *overrides: str, requests: int = 40, rate: float = 20.0, cost: CostModel = COST
) -> tuple[Outcome, dict[str, Any]]:
    built = WorkloadChoice.parse(workload).build(requests, rate, 0)
    outcome = Simulation("run", resolve((), overrides), built, cost).run()
    figures = summarise(outcome)
    assert figures["book_errors"] == 0
    return outcome, figures


def test_virtual_time_of_encoding_is_the_cost_models() -> None:
    """Two pictures of 100 tokens in steps of 100: twice 0.5 s, 2 s of tokens and 1 s of pairs; then the prefill."""
    cost = CostModel(
        base=10.0, per_token=0.0, encode_base=1.0, encode_per_token=0.02, encode_per_pair=1e-4, overhead=0.5
    )
    workload = "random:input=50,output=1,spread=0,items=2,media_tokens=100"
    outcome, figures = simulate(workload, "media.encode_tokens=100", requests=1, cost=cost)
    (record,) = outcome.records
    assert record.prompt_len == 250
    assert record.first_token - record.arrived == pytest.approx(2 * (0.5 + 2 + 1) + 10.5)
    assert (figures["encode_steps"], figures["encoded_pieces"], figures["encoder_hit_rate"]) == (2, 2, 0)
    assert figures["encode_share"] == pytest.approx(7 / outcome.duration)


@pytest.mark.parametrize("workload", ["random:input=60,output=8", "shared-prefix:output=8", "chat:turns=3,output=8"])
def test_every_request_is_served(workload: str) -> None:
    tight = ("memory.max_total_tokens=12000", "scheduler.estimate_max_new_tokens=1", "memory.page_size=4")
    outcome, figures = simulate(
        f"{workload},items=2,media_tokens=96,pieces=3,distinct=5", *tight, "media.cache_bytes=30000"
    )
    assert figures["finished"] == figures["requests"]
    assert figures["rejected"] == 0
    assert figures["encoded_pieces"] > 0
    assert {record.finished >= record.first_token >= record.scheduled for record in outcome.records} == {True}


def test_a_cache_that_holds_all_pictures_encodes_each_once() -> None:
    workload = "random:input=60,output=8,items=1,media_tokens=64,distinct=8"
    _, roomy = simulate(workload, "media.cache_bytes=51200", requests=200)
    _, tight = simulate(workload, "media.cache_bytes=19200", requests=200)
    assert roomy["encoded_pieces"] == 8
    assert roomy["encoder_hit_rate"] == pytest.approx(192 / 200)
    assert tight["encoded_pieces"] > 3 * roomy["encoded_pieces"]
    assert tight["encode_share"] > roomy["encode_share"]


def test_pictures_of_earlier_turns_are_not_encoded_again() -> None:
    """They are in the prefix cache. Twelve requests, a picture each: the last of four turns has four."""
    _, figures = simulate("chat:turns=4,output=8,items=1,media_tokens=64", requests=12, rate=2.0)
    assert (figures["requests"], figures["encoded_pieces"], figures["encoder_hit_rate"]) == (12, 12, 0)
    assert figures["hit_rate"] > 0.5
    # Nothing is lost of what an infinite cache would find, which tells pictures apart as the real one does.
    assert figures["hit_rate_of_optimal"] == pytest.approx(1.0)


def test_larger_steps_are_fewer_and_hold_up_decodes_for_longer() -> None:
    workload = "random:input=16,output=200,spread=0,items=4,media_tokens=256"
    found = {
        tokens: simulate(workload, f"media.encode_tokens={tokens}", requests=60, rate=2.0)[1] for tokens in (256, 1024)
    }
    assert found[256]["encoded_pieces"] == found[1024]["encoded_pieces"] == 240
    assert (found[256]["encode_steps"], found[1024]["encode_steps"]) == (240, 60)
    assert found[256]["itl"]["p99"] < found[1024]["itl"]["p99"]


def test_media_of_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    picture, video = {"id": 1, "start": 10, "tokens": 50}, {"id": 2, "start": 70, "tokens": 60, "pieces": 3}
    lines = [
        {"timestamp": 1.0, "input_length": 200, "output_length": 5, "media": [picture, video]},
        {"timestamp": 2.0, "prompt": list(range(11, 90)), "output_length": 5, "media": [{**picture, "start": 5}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = WorkloadChoice.parse(str(path)).build(10, 1.0, 0).arrivals()
    assert [place for place, token in enumerate(first.prompt().tolist()) if token == 3] == [
        *range(10, 60),
        *range(70, 130),
    ]
    assert [place for place, token in enumerate(second.prompt().tolist()) if token == 3] == list(range(5, 55))
    _, figures = simulate(str(path))
    # The second one shows what the first one has shown.
    assert (figures["finished"], figures["encoded_pieces"], figures["encoder_hit_rate"]) == (2, 4, 1 / 5)


@pytest.mark.parametrize(
    "media",
    [
        [{"id": 1, "start": 60, "tokens": 50}],
        [{"id": 1, "start": 0, "tokens": 20}, {"id": 2, "start": 10, "tokens": 20}],
        [{"id": 1, "start": 0, "tokens": 10, "pieces": 3}],
        [{"id": 1, "start": -1, "tokens": 10}],
        [{"start": 1, "tokens": 10}],
        7,
    ],
)
def test_media_that_a_trace_cannot_have(media: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"input_length": 100, "output_length": 5, "media": media}))
    with pytest.raises(ConfigError, match="line 1"):
        simulate(str(path))


def test_pieces_that_no_cache_holds_are_rejected() -> None:
    _, figures = simulate("random:items=1,media_tokens=64", "media.cache_bytes=6300", requests=3)
    assert (figures["rejected"], figures["finished"]) == (3, 0)


def test_a_cost_model_without_encoding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu-smollm2 does not say what encoding costs \(encode_base"):
        simulate("random:items=1", cost=load_cost("cpu-smollm2"))
    assert load_cost("h200-8b").encodes


def test_workloads_of_text_have_no_such_figures() -> None:
    outcome, figures = simulate("random:input=50,output=5", requests=3, cost=load_cost("cpu-smollm2"))
    assert outcome.encoding is None
    assert not [key for key in figures if key.startswith("encod")]
    others = ("encod", "accept", *TIERS, "computed", "load")
    assert [title for title, _ in table([figures])] == [title for title, key in ROWS if not key.startswith(others)]
    _, with_media = simulate("random:input=50,output=5,items=1", requests=3)
    rows = {title: cells for title, *cells in table([figures, with_media])}
    assert rows["pieces encoded"] == ["-", "3"]
