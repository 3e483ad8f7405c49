"""Tokens that a grammar forces are taken without asking the model, several in one step: fewer steps, the same text, and
nobody else notices. Whatever happens to a request between such steps: retraction, aborts, failing passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.messages import AbortRequest, TokenOutput
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.plugins.grammar import constraint, state
from tests.token_prompts import prompt_ids

FORCED = "is the first letter of an alphabet"
PATTERN = rf"(alpha|beta|gamma) {FORCED}(, or the last one|: [a-z]{{1,5}}) {FORCED} [a-z]{{1,3}}\."
"""Every answer has two long stretches that are forced, and ends with a choice, so that all before it is computed."""

TIGHT = 120
"""Tokens of a pool that the requests outgrow."""

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"scheduler": {"loop": "overlap"}},
    "pages-chunks": {"memory": {"page_size": 16}, "scheduler": {"chunked_prefill_size": 16}},
    "mixed-overlap": {"scheduler": {"loop": "overlap", "chunked_prefill_size": 16, "mixed_chunk": True}},
    "split": {"scheduler": {"split_prefill_layers": 1}},
    "no-cache": {"prefix_cache": {"use": "none"}},
    "tight": {"memory": {"max_total_tokens": TIGHT}, "scheduler": {"estimate_max_new_tokens": 1}},
    "tight-overlap": {
        "memory": {"max_total_tokens": TIGHT},
        "scheduler": {"estimate_max_new_tokens": 1, "loop": "overlap"},
    },
}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


def make(checkpoint: Path, **more: Any) -> Engine:
    base: dict[str, Any] = {
        "model": {"path": str(checkpoint), "dtype": "float32", "device": "cpu"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 2048},
        "log_level": "error",
    }
    for key, value in more.items():
        base[key] = {**base.get(key, {}), **value}
    return Engine.from_config(base)


def constrained(i: int, **more: Any) -> GenerateRequest:
    params = {"temperature": 1.0, "seed": i, "max_new_tokens": 140, "grammar": Grammar("regex", PATTERN), **more}
    return GenerateRequest(prompt=[5 + i, 9, 40 + i], rid=f"c{i}", sampling=SamplingParams(**params), stream=i % 2 == 0)


def free(i: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    return GenerateRequest(prompt=[60 + i, 8, 7, 30 + i], rid=f"f{i}", sampling=params)


REQUESTS = [request for i in range(4) for request in (constrained(i), free(i))]


def steps(engine: Engine) -> float:
    stats = engine.stats()
    return float(stats["decode_steps"] + stats["prefill_steps"])


@pytest.fixture(scope="module")
def plainly(checkpoint: Path) -> tuple[list[GenerateOutput], float]:
    """The answers without jumps, and the steps that they took."""
    with make(checkpoint, grammar={"jump_ahead": 0}) as engine:
        engine.run([constrained(9)])
        before = steps(engine)
        answers = engine.run(REQUESTS)
        assert engine.stats()["forced_tokens"] == 0
        return answers, steps(engine) - before


ALWAYS = ("overlap", "pages-chunks", "tight")
"""Arrangements of `make test`; the others run in `make test-full`."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in ARRANGEMENTS],
    ids=str,
)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Engine]:
    with make(checkpoint, **ARRANGEMENTS[request.param]) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        assert engine.built.scheduler.idle
        assert engine.built.scheduler.components.memory.idle_error() is None
        assert engine.stats()["book_errors"] == 0


def test_fewer_steps_and_what_the_grammar_says(engine: Engine, plainly: tuple[list[GenerateOutput], float]) -> None:
    expected, many = plainly
    engine.run([constrained(9)])  # so that the grammar is there and all begin at once
    before, forced = steps(engine), engine.stats()["forced_tokens"]
    answers = engine.run(REQUESTS)
    for request, answer, other in zip(REQUESTS, answers, expected, strict=True):
        if request.sampling.grammar is None:
            assert answer.token_ids == other.token_ids, "others run as if nothing were"
            continue
        assert re.fullmatch(PATTERN, answer.text), answer.text
        assert re.fullmatch(PATTERN, other.text), other.text
        assert answer.finish_reason["type"] == "stop"
        assert engine.tokenizer.decode(answer.token_ids) == answer.text
    stats = engine.stats()
    assert stats["forced_tokens"] - forced > 4 * len(FORCED)
    tight = engine.resolved.engine.memory.max_total_tokens == TIGHT
    if not tight:
        assert steps(engine) - before < many


def test_retractions(engine: Engine, plainly: tuple[list[GenerateOutput], float]) -> None:
    """Sixteen at once, which the tight pool cannot hold: whoever goes back keeps its place in the grammar."""
    engine.run([constrained(9)])
    twice = [(request, answer, n) for n in range(2) for request, answer in zip(REQUESTS, plainly[0], strict=True)]
    requests = [GenerateRequest(prompt=one.prompt, sampling=one.sampling, rid=f"{one.rid}-{n}") for one, _, n in twice]
    for (request, plain, _), answer in zip(twice, engine.run(requests), strict=True):
        if request.sampling.grammar is None:
            assert answer.token_ids == plain.token_ids
        else:
            assert re.fullmatch(PATTERN, answer.text), answer.text
    assert (engine.stats()["retractions"] > 0) == (engine.resolved.engine.memory.max_total_tokens == TIGHT)


def test_the_model_has_computed_the_forced_tokens(engine: Engine, checkpoint: Path) -> None:
    """What the prefix cache has of an answer, from the steps that caught up, is what a prefill would have computed."""
    request = constrained(7)
    answer = engine.run([request])[0]
    prompt = [*prompt_ids(request), *answer.token_ids, 11]
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    with make(checkpoint, prefix_cache={"use": "none"}) as fresh:
        (expected,) = fresh.generate([prompt], params, logprobs=5)
    (found,) = engine.generate([prompt], params, logprobs=5)
    if engine.resolved.engine.prefix_cache.use != "none":
        assert found.cached_tokens > len(answer.token_ids) // 2
    assert found.logprobs is not None
    assert expected.logprobs is not None
    ours, theirs = found.logprobs[0][2], expected.logprobs[0][2]
    assert [token for _, token in ours] == [token for _, token in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)


def test_aborted_after_any_number_of_steps(engine: Engine) -> None:
    scheduler = engine.built.scheduler
    for count in range(0, 24, 2):
        prepared = engine._submit([constrained(count), free(count)])
        ends: dict[str, Any] = {}
        done = 0
        while len(ends) < 2:
            engine._step()
            if (
                prepared[0].rid in engine._mail
                and scheduler.components.gates is not None
                and not scheduler.components.gates
            ):
                done += 1
            if done == count:
                scheduler.receive([AbortRequest(rid=prepared[0].rid)])
            for one in prepared:
                for output in engine._mail.get(one.rid, []):
                    if output.finish_reason is not None:
                        ends[one.rid] = output.finish_reason
        engine._mail.clear()
        assert ends[prepared[1].rid]["type"] == "length"


def test_a_limit_falls_among_the_forced(engine: Engine) -> None:
    for most in range(1, 30, 4):
        answer = engine.run([constrained(1, max_new_tokens=most)])[0]
        assert len(answer.token_ids) == most
        assert answer.finish_reason["type"] == "length"


def test_a_stop_string_falls_among_the_forced(engine: Engine) -> None:
    answer = engine.run([constrained(2, stop=("letter",))])[0]
    assert answer.text.endswith(" is the first ")
    assert answer.finish_reason == {"type": "stop", "matched": "letter"}


def test_whoever_wants_logprobs_gets_one_per_token(engine: Engine) -> None:
    before = engine.stats()["forced_tokens"]
    request = constrained(3)
    request.logprobs = 1
    answer = engine.run([request])[0]
    assert re.fullmatch(PATTERN, answer.text)
    assert len(answer.logprobs or ()) == len(answer.token_ids)
    assert engine.stats()["forced_tokens"] == before


def test_streamed_once(engine: Engine) -> None:
    request = constrained(4)
    pieces = list(engine.stream(request.prompt, request.sampling))
    text = "".join(piece.text for piece in pieces)
    assert re.fullmatch(PATTERN, text)
    assert sum(len(piece.token_ids) for piece in pieces) == pieces[-1].completion_tokens


def test_a_failing_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth pass over several requests fails; bisected, all go on and nothing is advanced twice."""
    runner: Any = engine.built.runner
    execute, calls = runner.execute, []

    def flaky(batch: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(batch.batch_size)
        if batch.batch_size > 1 and len(calls) % 5 == 0:
            raise RuntimeError("now and then")
        return execute(batch, *args, **kwargs)

    if engine.resolved.engine.scheduler.model_dump()["split_prefill_layers"]:
        pytest.skip("the runner is entered elsewhere")
    monkeypatch.setattr(runner, "execute", flaky)
    for request, answer in zip(REQUESTS, engine.run(REQUESTS), strict=True):
        if request.sampling.grammar is not None:
            assert re.fullmatch(PATTERN, answer.text), answer.text
        assert answer.finish_reason["type"] in ("stop", "length")
    assert engine.stats()["failed_batches"] > 0


def test_a_grammar_that_fails_behind_the_forced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends and is computed no further; the others do not notice."""
    expected = engine.run([free(0)])[0]
    engine.run([constrained(9)])
    ahead = state.forced

    def fill(*_: object, **__: object) -> None:
        raise RuntimeError("no fuel")

    def forced(req: Any, place: Any) -> list[int]:
        tokens = ahead(req, place)
        if len(tokens) > 2:
            monkeypatch.setattr(state, "allow_ends", fill)
        return tokens

    monkeypatch.setattr(constraint, "forced", forced)
    failing, other = constrained(5), free(0)
    rids = [one.rid for one in engine._submit([failing, other])]
    ends: dict[str, TokenOutput] = {}
    while len(ends) < len(rids):
        ends.update(
            (rid, output) for rid in rids if rid not in ends for output in engine._take(rid) if output.finish_reason
        )
    engine._forget(rids)
    reason = ends[failing.rid].finish_reason
    assert reason is not None
    assert "no fuel" in reason["message"]
    assert ends[other.rid].token_ids == expected.token_ids
