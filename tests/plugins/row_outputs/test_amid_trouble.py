"""Embeddings amid trouble: aborted midway, a pooler that raises, a forward pass that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import AbortRequest, TokenOutput
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.row_outputs.api import PoolSpan
from pegboard.plugins.row_outputs.messages import NAME, Said
from pegboard.plugins.row_outputs.stage import RowOutputs

LONG, SHORT = [5 + i % 50 for i in range(60)], [7, 8, 9]


@pytest.fixture(scope="module", params=["normal", "overlap"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    checkpoint: Path = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=2)
    with Engine.from_config(
        {
            "model": {"path": str(checkpoint), "dtype": "float32", "device": "cpu"},
            "memory": {"max_total_tokens": 512},
            "scheduler": {"chunked_prefill_size": 16, "loop": request.param},
            "pooler": {"use": "mean"},
            "log_level": "error",
        }
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    scheduler = engine.built.scheduler
    for _ in range(5):
        scheduler.step()
    assert scheduler.idle
    assert scheduler.components.memory.idle_error() is None


def pooler_of(engine: Engine) -> Any:
    (stage,) = (one for one in engine.built.scheduler.components.points.stages if isinstance(one, RowOutputs))
    return stage.pooler


def vector_of(output: TokenOutput) -> bytes:
    """The embedding that an output brings."""
    whole = (output.features or {}).get(NAME)
    return b"" if whole is None else msgspec.msgpack.decode(whole, type=Said).vector


def start(engine: Engine, *prompts: list[int]) -> list[str]:
    requests = [engine._intake.prepare_embed(EmbedRequest(prompt=prompt)) for prompt in prompts]
    return [one.rid for one in engine._send(requests)]


def test_aborted_midway(engine: Engine) -> None:
    """After every number of steps that it takes."""
    for steps in range(6):
        (rid,) = start(engine, LONG)
        outputs = []
        for _ in range(steps):
            outputs += engine.built.scheduler.step()
        done = bool(outputs)
        engine.built.scheduler.receive([AbortRequest(rid=rid)])
        for _ in range(8):
            outputs += engine.built.scheduler.step()
        engine._mail.clear()
        assert [one.rid for one in outputs] == [rid], "answered once, whichever way"
        assert not vector_of(outputs[0]) or done or engine.resolved.engine.scheduler.loop == "overlap"
        assert engine.built.scheduler.idle
        assert engine.built.scheduler.components.memory.idle_error() is None


def test_a_pooler_that_raises_fails_its_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pooler = pooler_of(engine)
    combine, rows, first = pooler.combine, pooler.rows, pooler.first
    expected = engine.embed([SHORT])[0].vector

    def bad_combine(partials: Sequence[Any], length: int) -> Any:
        if length == len(LONG):
            raise ZeroDivisionError("no such length")
        return combine(partials, length)

    def bad_rows(span: PoolSpan) -> range:
        if span.length == len(LONG):
            raise ZeroDivisionError("no such span")
        return rows(span)

    def bad_first(length: int) -> int:
        if length == len(LONG):
            raise ZeroDivisionError("no such prompt")
        return first(length)

    for name, bad in (("combine", bad_combine), ("rows", bad_rows), ("first", bad_first)):
        with monkeypatch.context() as patch:
            patch.setattr(pooler, name, bad)
            with pytest.raises(InvalidRequest, match=r"pool|'row_outputs'") as caught:
                engine.embed([LONG])
            assert caught.value.status == 500
            assert engine.embed([SHORT])[0].vector == pytest.approx(expected, abs=1e-6)


def test_a_reduction_that_raises_is_bisected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pooler = pooler_of(engine)
    reduce = pooler.reduce
    expected = engine.embed([SHORT])[0].vector
    engine.flush_cache()

    def bad(hidden: torch.Tensor, spans: Sequence[PoolSpan]) -> torch.Tensor:
        if any(span.length == 4 for span in spans):
            raise ZeroDivisionError("four tokens are too many")
        return reduce(hidden, spans)

    monkeypatch.setattr(pooler, "reduce", bad)
    rids = start(engine, SHORT, [5, 6, 7, 8], SHORT[::-1])
    ends = {}  # type: ignore[var-annotated]
    while len(ends) < 3:
        ends.update({one.rid: one for one in engine.built.scheduler.step()})
    engine._mail.clear()
    reasons = [(ends[rid].finish_reason or {})["type"] for rid in rids]
    assert reasons == ["length", "abort", "length"]
    found = torch.frombuffer(bytearray(vector_of(ends[rids[0]])), dtype=torch.float32)
    torch.testing.assert_close(found / found.norm(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_failed_chunk_of_a_prompt_whose_logprobs_are_wanted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with another request and this one's first chunk fails once: it is computed again in halves, and no logprob
    is missing or doubled.
    """
    sampling = SamplingParams(temperature=0.0, max_new_tokens=3)
    requests = [
        GenerateRequest(prompt=prompt, sampling=sampling, logprobs=1, logprob_start=0) for prompt in (SHORT, LONG)
    ]
    expected = engine.run(requests)
    engine.flush_cache()
    runner: Any = engine.built.runner
    execute, calls = runner.execute, []

    def flaky(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("once")
        return execute(*args, **kwargs)

    monkeypatch.setattr(runner, "execute", flaky)
    for answer, good in zip(engine.run(requests), expected, strict=True):
        assert answer.token_ids == good.token_ids
        assert answer.input_logprobs is not None
        assert good.input_logprobs is not None
        for (value, token, _), (right, same, _) in zip(answer.input_logprobs, good.input_logprobs, strict=True):
            assert token == same
            assert value == (None if right is None else pytest.approx(right, abs=1e-4))
    assert engine.stats()["failed_batches"] >= 1
