"""Drafts that the speculator judges by thresholds, in an engine: lower ones accept more, logprobs are those of what is
gained, greedy requests and grammars keep what they are promised, and a judge that fails changes nothing.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.plugins.spec_ngram.speculator import NgramSpeculator

SAID = range(20, 28)
"""The tokens that are said, letters and digits: few, so that what has been said is said again."""
REGEX = "[a-z0-9 ]*"
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 6},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "grammar": Grammar("regex", REGEX)},
)
REQUESTS = [
    GenerateRequest(
        prompt=[5 + number, *SAID],
        sampling=SamplingParams(
            **{"max_new_tokens": 40, "ignore_eos": True, "logit_bias": dict.fromkeys(SAID, 60.0), **more}
        ),
        logprobs=len(SAID),
    )
    for number, more in enumerate(PARAMS)
]
THRESHOLDS: dict[str, Any] = {"use": "ngram", "accept": "thresholds", "min_match": 1}
LOW = {**THRESHOLDS, "accept_threshold_single": 0.3, "accept_threshold_acc": 0.3}


def answers(
    checkpoints: Path, runner: str = "layered", count: int = len(REQUESTS), **speculation: Any
) -> tuple[list[GenerateOutput], Any]:
    """What the first `count` requests are answered, and the engine's counters."""
    native = runner == "cpu_native"
    config = {
        "model": {
            "path": str(tiny_checkpoint(checkpoints, "llama", num_hidden_layers=1)),
            "dtype": "bfloat16" if native else "float32",
            "device": "cpu",
        },
        "runner": {"use": runner},
        "memory": {"max_total_tokens": 1024},
        "log_level": "error",
        "speculation": {"adaptive": False, "max_nodes": 4, **speculation},
    }
    with Engine.from_config(config) as engine:
        outputs = engine.run(REQUESTS[:count])
        stats = engine.stats()
        assert stats["book_errors"] == 0
        assert [len(output.token_ids) for output in outputs] == [40] * count
        assert count < len(REQUESTS) or re.fullmatch(REGEX, outputs[-1].text)
        return outputs, stats


def accept_length(stats: dict[str, Any]) -> float:
    """Tokens per request and pass with drafts."""
    return 1 + float(stats["accepted_tokens"] / stats["drafted_requests"])


def check(outputs: list[GenerateOutput], stats: dict[str, Any]) -> None:
    """Nothing has failed, and each token's logprob is the one that it has among those of all that could be said."""
    assert stats["plugin_failures"] == stats["failed_batches"] == 0
    for output in outputs:
        assert output.logprobs is not None
        for value, token, tops in output.logprobs:
            assert token in SAID
            assert value == pytest.approx({one: given for given, one in tops}[token], abs=1e-4)


@pytest.mark.parametrize("runner", ["layered", pytest.param("cpu_native", marks=pytest.mark.full)])
def test_lower_thresholds_accept_more(runner: str, checkpoints: Path) -> None:
    exact, low = (answers(checkpoints, runner, **one) for one in (THRESHOLDS, LOW))
    for one in (exact, low):
        check(*one)
    assert accept_length(low[1]) > 1.15 * accept_length(exact[1]) > 1.15
    if runner == "layered":
        assert [one.token_ids for one in low[0][:2]] == [one.token_ids for one in exact[0][:2]], "greedy"
    assert [one.token_ids for one in low[0][2:]] != [one.token_ids for one in exact[0][2:]]


@pytest.mark.full
def test_a_judge_that_fails_changes_nothing(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds give what they give without speculation."""
    expected, _ = answers(checkpoints, use="none")

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("no verdict today")

    monkeypatch.setattr(NgramSpeculator, "accept", fails)
    found, stats = answers(checkpoints, **LOW)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert stats["accepted_tokens"] > 0
    assert stats["plugin_failures_by"] == {"speculator": {"ngram": 10}}


@pytest.mark.full
def test_a_failed_pass_is_judged_in_parts(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judgement is the same whatever other requests are there. Which drafts there are must not depend on how busy the
    machine is: so they are never late, and the last request, which would join once its grammar is compiled, is away.
    """
    for bound in ("LATE_SECONDS", "LATE_BY_CLOCK"):
        monkeypatch.setattr(f"pegboard.plugins.speculation.stage.{bound}", float("inf"))
    count = len(REQUESTS) - 1
    expected, _ = answers(checkpoints, count=count, **LOW)
    execute, passes = LayeredRunner.execute, itertools.count()

    def fails(self: Any, batch: Any, sampling: Any, **more: Any) -> Any:
        if more and batch.batch_size > 1 and next(passes) % 3 == 0:
            raise RuntimeError("out of luck")
        return execute(self, batch, sampling, **more)

    monkeypatch.setattr(LayeredRunner, "execute", fails)
    found, stats = answers(checkpoints, count=count, **LOW)
    assert stats["failed_batches"] > 3
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
