"""What docs/operation.md says that a request may cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.points import encoded
from pegboard.plugins.api_native.information import ServerAnswer
from pegboard.plugins.row_outputs.messages import NAME, Asked
from pegboard.plugins.stop_expressions.stage import NAME as EXPRESSIONS
from pegboard.toolkit.http import budget
from pegboard.toolkit.http.budget import Budget, BudgetLimits, Demand
from tests.core.pipeline.harness import Harness
from tests.docs.test_face import cells, code
from tests.features import prices

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operation.md").read_text("utf-8")
PROSE = " ".join(PAGE.split())
SAMPLING = " ".join((DOCS / "sampling.md").read_text("utf-8").split())
MOST = BudgetLimits()


def demand(n: int, prompt: int, length: int = 16, hidden_size: int = 64, **wanted: Any) -> Demand:
    sampling = SamplingParams(max_new_tokens=length, **wanted.pop("sampling", {}))
    embed = wanted.pop("embed", False)
    one = TokenizedRequest(rid="r", prompt=b"\1\0\0\0" * prompt, sampling=sampling, **wanted)
    if sampling.stop_regex:
        one.features[EXPRESSIONS] = encoded(True)
    if embed:
        one.features[NAME] = encoded(Asked(embed=True))
    return Demand.of([one] * n, prices(hidden_size))


def test_what_server_info_has() -> None:
    """The figures of a scheduler without tiers and gates, which has all but `scheduler.tiers`."""
    tables = PAGE.partition("\n## What `/server_info` has\n")[2].partition("\n## ")[0]
    about, _, paths = tables.partition("| path | what it has |")
    named = {name for row in cells(about) for name in code(row[0])}
    assert named == set(ServerAnswer.model_fields) | {"media", "tracing_otel"}
    told = {
        name.removeprefix("scheduler.").removesuffix(".NAME")
        for row in cells("| path |" + paths)
        for name in code(row[0])
    }
    assert len(told) > 25
    assert told - set(Harness().scheduler.info()) == {"tiers"}


def test_prices() -> None:
    table = PAGE[PAGE.index("| for each answer | bytes |") : PAGE.index("For each answer a stop string")]
    prices = [int(one.replace(",", "")) for one in re.findall(r"\| ([\d,]+) \|$", table, re.MULTILINE)]
    names = ("REQUEST", "ENTRY", "NUMBER", "PROMPT", "SETTING", "ID", "CHAR")
    assert prices == [getattr(budget, f"{name}_BYTES") for name in names]
    assert f"{budget.TEXT_BYTES} bytes for a character of the longest" in PROSE
    assert f"at a time, and {budget.WAITING_BYTES} for one of the others" in PROSE
    assert f"{budget.CHARS_PER_STEP} characters of expressions take one more" in PROSE
    assert f"{budget.FREE_BYTES // 1024} KiB, and every answer {budget.FREE_STEPS} steps, for free" in PROSE


@pytest.mark.parametrize(
    ("said", "asked", "more"),
    [
        ("a prompt of 21,000 tokens", demand(1, 21_000), demand(1, 22_000)),
        ("128 tokens with the 5 likeliest", demand(1, 100, 128, logprobs=5), demand(1, 100, 128, logprobs=6)),
        ("`n` up to 31 for a prompt of 20 tokens", demand(31, 20), demand(32, 20)),
        ("up to 12 for one of 1,000", demand(12, 1_000), demand(13, 1_000)),
    ],
)
def test_what_is_free(said: str, asked: Demand, more: Demand) -> None:
    assert said in PROSE
    assert (asked.bytes, asked.steps) == (0, 0)
    assert more.bytes > 0


@pytest.mark.parametrize(
    ("said", "asked", "more"),
    [
        (
            "8,192 tokens with the 20 largest at each",
            demand(1, 100, 8_192, logprobs=20),
            demand(1, 1, 10_100, logprobs=20),
        ),
        (
            "50 tokens with those of 4,096 ids",
            demand(1, 100, 50, logprobs=0, token_ids_logprob=tuple(range(4096))),
            demand(1, 100, 52, logprobs=0, token_ids_logprob=tuple(range(4096))),
        ),
        (
            "245 short texts at 4,096 numbers",
            demand(245, 20, 0, 4_096, embed=True),
            demand(250, 20, 0, 4_096, embed=True),
        ),
        ("900 at 1,024", demand(900, 20, 0, 1_024, embed=True), demand(920, 20, 0, 1_024, embed=True)),
    ],
)
def test_what_one_request_may_ask_for(said: str, asked: Demand, more: Demand) -> None:
    assert said in PROSE
    assert asked.bytes <= MOST.request_bytes < more.bytes


@pytest.mark.parametrize(
    ("said", "n", "stops"),
    [
        ("4 answers with 1024 states", 4, {"stop_regex": ("a{1023}",)}),
        ("85 with 64 stop strings", 85, {"stop": tuple(f"stop {i}" for i in range(64))}),
    ],
)
def test_steps_of_stops(said: str, n: int, stops: dict[str, Any]) -> None:
    assert said in SAMPLING
    assert f"{MOST.request_steps:,} steps" in SAMPLING
    taken, refused = demand(n, 20, sampling=stops), demand(n + 1, 20, sampling=stops)
    Budget().check_steps(taken.steps)
    assert taken.steps <= MOST.request_steps < refused.steps
