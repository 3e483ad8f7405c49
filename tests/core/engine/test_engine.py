"""The engine in one process: several readers at once, and what is left when one stops early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
CONFIG = {"attention": {"use": "torch"}, "memory": {"max_total_tokens": 1024}}
FIRST, SECOND = [3, 4, 5], [6, 7, 8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=1)


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    config = {**CONFIG, "model": {"path": str(checkpoint), "dtype": "float32"}}
    with Engine(compose(data=config, env={})) as engine:
        yield engine
        assert engine.built.scheduler.idle
        assert engine.built.scheduler.components.memory.idle_error() is None


def never_more_than(engine: Engine, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose outputs went to somebody else would step for ever."""
    step, left = engine.built.scheduler.step, iter(range(steps))

    def counted() -> object:
        assert next(left, None) is not None, "too many steps"
        return step()

    monkeypatch.setattr(engine.built.scheduler, "step", counted)


def test_streams_may_be_read_in_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [output.token_ids for output in engine.generate([FIRST, SECOND], GREEDY)]
    never_more_than(engine, 40, monkeypatch)
    found: list[list[int]] = [[], []]
    for chunks in zip(engine.stream(FIRST, GREEDY), engine.stream(SECOND, GREEDY), strict=True):
        for tokens, chunk in zip(found, chunks, strict=True):
            tokens += chunk.token_ids
    assert found == alone


def test_generates_while_a_stream_is_open(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [output.token_ids for output in engine.generate([FIRST, SECOND], GREEDY)]
    never_more_than(engine, 40, monkeypatch)
    stream = engine.stream(FIRST, GREEDY)
    tokens = next(stream).token_ids
    assert engine.generate([SECOND], GREEDY)[0].token_ids == alone[1]
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == alone[0]


def test_a_refused_request_spares_the_one_of_its_name(engine: Engine) -> None:
    request = GenerateRequest(prompt=FIRST, sampling=GREEDY, rid="mine")
    alone = engine.generate([FIRST], GREEDY)[0].token_ids
    stream = engine.stream(FIRST, GREEDY, rid="mine")
    tokens = next(stream).token_ids
    with pytest.raises(InvalidRequest, match="still running"):
        engine.run([request])
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == alone
    with pytest.raises(InvalidRequest, match="still running"):
        engine.run([request, request])
    assert engine.run([request])[0].token_ids == alone


def test_an_interrupted_generate_leaves_nothing_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        step = engine.built.scheduler.step

        def interrupted() -> object:
            step()
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(engine.built.scheduler, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([FIRST, SECOND], GREEDY)
    assert engine.built.scheduler.idle


def test_closing_a_stream_early_aborts_it(engine: Engine) -> None:
    stream = engine.stream(FIRST, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.built.scheduler.idle


def read(engine: Engine, unfinished: int, most: int = 200) -> dict[str, list[int]]:
    """Poll until so many requests have ended; the tokens of all, by rid."""
    found: dict[str, list[int]] = {}
    for _ in range(most):
        for chunk in engine.poll():
            found.setdefault(chunk.rid, []).extend(chunk.token_ids)
            unfinished -= chunk.finish_reason is not None
        if not unfinished:
            return found
    raise AssertionError("too many steps")


@pytest.mark.parametrize("stream", [True, False])
def test_requests_may_be_submitted_while_others_run(engine: Engine, stream: bool) -> None:
    alone = [output.token_ids for output in engine.generate([FIRST, SECOND], GREEDY)]
    first = engine.submit(GenerateRequest(prompt=FIRST, sampling=GREEDY, stream=stream))
    begun = [token for chunk in engine.poll() for token in chunk.token_ids]
    assert len(begun) <= 1, "poll makes one step"
    second = engine.submit(GenerateRequest(prompt=SECOND, sampling=GREEDY, stream=stream))
    found = read(engine, 2)
    assert [begun + found[first], found[second]] == alone
    assert engine.poll() == []


def test_polling_takes_nothing_from_other_readers(engine: Engine) -> None:
    alone = [output.token_ids for output in engine.generate([FIRST, SECOND], GREEDY)]
    reader = engine.stream(FIRST, GREEDY)
    tokens = next(reader).token_ids
    rid = engine.submit(GenerateRequest(prompt=SECOND, sampling=GREEDY, rid="polled"))
    assert read(engine, 1) == {"polled": alone[1]}
    assert rid == "polled"
    assert tokens + [token for chunk in reader for token in chunk.token_ids] == alone[0]


def test_a_submitted_request_can_be_aborted(engine: Engine) -> None:
    rids = [engine.submit(GenerateRequest(prompt=one, sampling=GREEDY)) for one in (FIRST, SECOND)]
    engine.abort(rids[0], "unknown")
    assert list(read(engine, 1)) == [rids[1]]
    engine.submit(GenerateRequest(prompt=FIRST, sampling=GREEDY, rid=rids[0]))
    engine.abort(rids[0])
    assert engine.built.scheduler.idle


def test_a_request_that_cannot_be_served_is_not_submitted(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        engine.submit(GenerateRequest(prompt=[]))
    assert engine.poll() == []


def test_min_new_tokens_knows_every_token_that_ends_an_output(checkpoint: Path, tmp_path: Path) -> None:
    """Some models name their end only in the tokenizer's files."""
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        if (directory / name).exists():
            settings = json.loads((directory / name).read_text())
            (directory / name).write_text(json.dumps({**settings, "eos_token_id": None}))
    wants_to_end = SamplingParams(temperature=0, max_new_tokens=8, min_new_tokens=5, logit_bias={2: 100.0})
    with Engine(compose(data={**CONFIG, "model": {"path": str(directory), "dtype": "float32"}}, env={})) as engine:
        (output,) = engine.generate([FIRST], wants_to_end)
    assert (len(output.token_ids), output.finish_reason) == (6, {"type": "stop", "matched": 2})


def test_an_engine_without_books_does_not_go_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that raises where nothing can be undone: later calls say so, where they would have waited for ever."""

    class Lost(LookupError):
        pass

    def lose(*_: object) -> None:
        raise Lost("who has page 7?")

    config = {**CONFIG, "model": {"path": str(checkpoint), "dtype": "float32"}}
    with Engine(compose(data=config, env={})) as engine:
        never_more_than(engine, 20, monkeypatch)
        stream = engine.stream(SECOND, GREEDY)
        next(stream)
        monkeypatch.setattr(engine.built.scheduler.components.memory.cache, "unlock", lose)
        with pytest.raises(Lost, match=r"^'?who has page 7\?"):
            engine.run([GenerateRequest(prompt=FIRST, sampling=GREEDY)])
        monkeypatch.undo()
        stopped = r"the engine has stopped, and a new one is needed: Lost: who has page 7\?"
        with pytest.raises(Lost, match=stopped) as caught:
            list(stream)
        assert isinstance(caught.value.__cause__, Lost)
        for call in (
            lambda: engine.generate([FIRST], GREEDY),
            lambda: next(engine.stream(FIRST, GREEDY)),
            lambda: engine.submit(GenerateRequest(prompt=FIRST)),
            lambda: engine.embed([FIRST]),
            engine.flush_cache,
        ):
            with pytest.raises(Lost, match=stopped):
                call()
        assert engine.stats()["accepted"] == 2


def test_a_poll_of_a_stopped_engine_raises(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG, "model": {"path": str(checkpoint), "dtype": "float32"}}
    with Engine(compose(data=config, env={})) as engine:
        rid = engine.submit(GenerateRequest(prompt=FIRST, sampling=GREEDY))
        monkeypatch.setattr(engine.built.scheduler, "step", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                engine.poll()
        engine.abort(rid)
        with pytest.raises(ZeroDivisionError, match="the engine has stopped"):
            engine.poll()
