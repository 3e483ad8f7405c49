"""Stops of a batch: compiled once each, beside the loop, and never more of them than are used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import pytest

from pegboard.core.frontend import stops as stops_of_requests
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenOutput, TokenOutputs
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.server.client import AsyncEngineClient
from pegboard.plugins.stop_expressions import stage as expressions_module
from pegboard.plugins.stop_expressions.program import Program
from pegboard.plugins.stop_expressions.stage import Expressions
from pegboard.toolkit.http.budget import CHARS_PER_STEP, FREE_STEPS, Budget, Demand
from pegboard.toolkit.text import stop as stop_module
from pegboard.toolkit.text.stop import StopMatcher, Stops, compiled
from tests.faults.test_bounds import Prepared, play, submitted  # type: ignore[attr-defined]
from tests.features import prices

PRICES = prices(1)
Spelt = tuple[str, ...]
CLASS = "".join(chr(0x4E00 + i) for i in range(1000))
"""Characters of a costly class: each automaton has few states, and takes long to make."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Spelt, threading.Thread]]]:
    """Which stops are compiled, and by which thread."""
    found: list[tuple[Spelt, threading.Thread]] = []

    class Recorded(Stops):
        def __init__(self, strings: Any) -> None:
            if strings:
                found.append((tuple(strings), threading.current_thread()))
            super().__init__(strings)

    class RecordedExpressions(Expressions):
        def __init__(self, patterns: tuple[str, ...]) -> None:
            found.append((patterns, threading.current_thread()))
            super().__init__(patterns)

    monkeypatch.setattr(stop_module, "Stops", Recorded)
    monkeypatch.setattr(expressions_module, "Expressions", RecordedExpressions)
    for module in (stop_module, expressions_module):  # nothing here that answers of other tests still have
        monkeypatch.setattr(module, "_in_use", WeakValueDictionary())
    compiled.cache_clear()
    expressions_module.compiled.cache_clear()
    yield found
    compiled.cache_clear()
    expressions_module.compiled.cache_clear()


def asked(*stops: dict[str, Any]) -> list[GenerateRequest]:
    return [GenerateRequest(prompt="Hi", sampling=SamplingParams(**one)) for one in stops]


@pytest.mark.parametrize("kind", ["expressions", "strings"])
def test_many_different_stops_are_compiled_once_and_off_the_loop(kind: str, made: list[Any]) -> None:
    """More than the cache keeps, each for two answers: nothing is compiled again, by the loop least of all."""
    if kind == "expressions":
        different: list[dict[str, Any]] = [{"stop_regex": (f"[ab]{{4}}{i}",)} for i in range(200)]
    else:
        different = [{"stop": (f"{i}".ljust(1024, "x"),)} for i in range(200)]

    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        answers = await submitted(client, wire, *asked(*different, *different))
        for one in wire.sent:
            await wire.say(TokenOutputs(outputs=[TokenOutput(rid=one.rid, token_ids=[97, 98])]))
        await answers.aclose()

    play(scene)
    assert len(made) == len({spelt for spelt, _ in made}) == 200
    assert threading.main_thread() not in {thread for _, thread in made}


def test_the_scheduler_shares_what_its_answers_have(made: list[Any]) -> None:
    """However answers that share stops and others take turns."""
    patterns = [f"[ab]{{4}}{i}" for i in range(200)]
    matchers = [StopMatcher((), (expressions_module.compiled((one,)),)) for _ in range(3) for one in patterns]
    assert len(made) == 200
    del matchers
    assert len(expressions_module._in_use) <= 64, "what no answer has any more is forgotten"


@pytest.mark.parametrize(
    "stops",
    [
        [{"stop_regex": tuple(f"[{CLASS}]{i}-{j}" for j in range(16))} for i in range(330)],
        [{"stop_regex": tuple(f"{i}-{j}".ljust(61, "x") for j in range(16))} for i in range(330)],
        [{"stop_regex": (f"[ab]{{1000}}{i}",)} for i in range(330)],
    ],
    ids=["classes", "literals", "repeats"],
)
def test_what_is_too_costly_is_refused_before_it_is_compiled(stops: list[dict[str, Any]], made: list[Any]) -> None:
    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        with pytest.raises(InvalidRequest, match="request_steps") as caught:
            await client.submit_all(asked(*stops))
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "request_too_costly", "stop")
        assert wire.sent == []

    play(scene)
    assert len(made) < 10


def test_a_long_expression_costs_more_than_its_states_once() -> None:
    one = Prepared(stop_regex=tuple(f"[{CLASS}]{i}" for i in range(16))).prepared
    alone, three = Demand.of([one], PRICES).steps, Demand.of([one] * 3, PRICES).steps
    states = expressions_module.compiled(one.sampling.stop_regex).steps
    assert alone == states + sum(map(len, one.sampling.stop_regex)) // CHARS_PER_STEP - FREE_STEPS
    assert three - alone == 2 * (states - FREE_STEPS)


def test_prices_are_those_that_are_charged(made: list[Any]) -> None:
    """What is reckoned while stops are compiled is what the requests are charged afterwards."""
    few = [{"stop_regex": (f"[{CLASS[:500]}]{i}",), "stop": ("a" * 9,) * (i % 3)} for i in range(20)]
    requests = asked(*few, *few)
    seen: list[int] = []

    class Told(Budget):
        def check_steps(self, steps: int) -> None:
            seen.append(steps)

    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        async with stops_of_requests.compiled_stops(requests, client._intake, Told()):
            prepared = client._intake.prepare_all(requests, [b"\1\0\0\0"] * len(requests))
            assert Demand.of(prepared, PRICES).steps == seen[-1] > 0

    play(scene)


def test_a_stop_string_costs_nothing_until_it_begins() -> None:
    class Counted(str):
        looked = 0

        def __getitem__(self, key: object) -> str:
            Counted.looked += 1
            return super().__getitem__(key)  # type: ignore[index]

    matcher = StopMatcher([Counted("ab" * 512)])
    matcher.feed("xyz" * 1000)
    assert Counted.looked <= 2
    matcher.feed("ab" * 10)
    assert Counted.looked < 200


def test_a_class_in_a_repeat_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    test = Program._test

    def counted(self: Program, *args: Any) -> int:
        nonlocal calls
        calls += 1
        return test(self, *args)

    monkeypatch.setattr(Program, "_test", counted)
    Program([f"[{CLASS}]{{900}}a", f"[{CLASS}]b"])
    assert calls == 4
