"""Drafts in outputs with grammars: the same tokens as without them, all of them allowed, however often a grammar
forbids or forces what was drafted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.toolkit.grammars.grammar import grammar_of
from tests.e2e.schemas import corpus
from tests.e2e.test_grammars import EBNFS, REGEXES, TAG, config, validate
from tests.token_prompts import prompt_ids

SEVENTH = corpus()[::7]


def requests_of(schemas: Sequence[tuple[str, Any]]) -> list[GenerateRequest]:
    """One for each schema, and some with other grammars, each with a prompt of its own."""
    grammars = [grammar_of(json_schema=schema) for _, schema in schemas]
    grammars += [Grammar("regex", one) for one in REGEXES] + [Grammar("ebnf", one) for one, _ in EBNFS]
    grammars += [Grammar("structural_tag", json.dumps({**TAG, "at_least_one": False}))] * 2
    return [
        GenerateRequest(
            prompt=[3 + number % 90, 5, 3 + number // 90, 9],
            sampling=SamplingParams(max_new_tokens=120, temperature=1.0, seed=number, grammar=grammar),
            logprobs=1 if number % 4 == 0 else None,
        )
        for number, grammar in enumerate(grammars)
    ]


def answers(model: Path, wanted: Sequence[GenerateRequest], jump: int, **speculation: Any) -> list[GenerateOutput]:
    settings = config(str(model), "llguidance", chunked_prefill_size=8)
    settings["grammar"] |= {"jump_ahead": jump, "step_seconds": 1.0}
    with Engine.from_config({**settings, "speculation": {"max_batch": 64, "adaptive": False, **speculation}}) as engine:
        outputs = engine.run(wanted)
        stats = engine.stats()
        assert stats["book_errors"] == stats["failed_batches"] == stats["plugin_failures"] == 0
        assert (stats["accepted_tokens"] > 0) == (speculation["use"] != "none")
        assert (stats["forced_tokens"] > 0) == (jump > 0)
        return outputs


def check(model: Path, schemas: Sequence[tuple[str, Any]], jump: int, shape: str) -> None:
    wanted = requests_of(schemas)
    plain = answers(model, wanted, jump, use="none")
    recorded = {
        " ".join(map(str, prompt_ids(request))): output.token_ids for request, output in zip(wanted, plain, strict=True)
    }
    drafted = answers(model, wanted, jump, use="drill", outputs=recorded, shape=shape, hit_rate=0.8, ragged=True)
    finished = 0
    for number, (before, after) in enumerate(zip(plain, drafted, strict=True)):
        assert after.token_ids == before.token_ids, (number, wanted[number].sampling.grammar)
        assert after.finish_reason == before.finish_reason, number
        if before.logprobs is not None:
            assert after.logprobs is not None
            values = [[value for value, *_ in one.logprobs or ()] for one in (before, after)]
            assert values[1] == pytest.approx(values[0], abs=1e-3), number
        if number < len(schemas) and after.finish_reason["type"] == "stop":
            validate(schemas[number][1], after.text)
            finished += 1
    assert finished >= 0.4 * len(schemas)


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.mark.parametrize(("jump", "shape"), [(2, "chain"), (0, "tree")])
def test_same_answers(jump: int, shape: str, model: Path) -> None:
    check(model, SEVENTH, jump, shape)


@pytest.mark.full
@pytest.mark.parametrize(("jump", "shape"), [(0, "chain"), (2, "tree")])
def test_same_answers_to_two_hundred_schemas(jump: int, shape: str, model: Path) -> None:
    check(model, corpus(), jump, shape)
