"""What breaks servers through their grammars, by the numbers of the reports; and that nobody else notices.

sglang 4574, vLLM 17313, TGI 2280: a bad schema, regex or grammar kills the server. sglang 7639: a recursive grammar, or
a grammar that is asked for with no backend. CVE-2025-48944: tool schemas that crash; grammar caches are bounded.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 90.0

SELF: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DEEP = '{"type":"array","items":' * 3000 + "true" + "}" * 3000
SLOW = {"anyOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{400 + n}}}c{{1,300}}d*$"} for n in range(60)]}

MANY = {"type": "object", "properties": {f"p{n}": {"type": ["integer", "string"]} for n in range(2000)}}

BAD: dict[str, dict[str, Any]] = {
    "no JSON": {"json_schema": "{"},
    "no schema": {"json_schema": "[1, 2]"},
    "an unknown type": {"json_schema": '{"type": "nonsense"}'},
    "a bad pattern": {"json_schema": '{"type": "string", "pattern": "(a"}'},
    "a contradiction": {"json_schema": '{"type": "integer", "minimum": 9, "maximum": 1}'},
    "a reference to nothing": {"json_schema": '{"$ref": "#/$defs/nothing"}'},
    "a reference to elsewhere": {"json_schema": '{"$ref": "http://127.0.0.1:9/schema.json"}'},
    "a reference to a file": {"json_schema": '{"$ref": "file:///etc/passwd"}'},
    "recursion without end": {"json_schema": json.dumps(SELF)},
    "nothing but itself": {"json_schema": '{"$ref": "#"}'},
    "nested too deeply": {"json_schema": DEEP},
    "too large": {"json_schema": json.dumps({"enum": [f"value {n}" for n in range(30_000)]})},
    "a multiple of almost nothing": {"json_schema": '{"type": "number", "multipleOf": 1e-300}'},
    "a multiple of infinity": {"json_schema": '{"type": "number", "multipleOf": 1e400}'},
    "a multiple of nothing": {"json_schema": '{"type": "integer", "multipleOf": 0}'},
    "a multiple of a huge number": {"json_schema": f'{{"type": "integer", "multipleOf": 1{"0" * 5000}}}'},
    "a multiple of a large prime": {"json_schema": '{"type": "integer", "multipleOf": 1000003}'},
    "a multiple of many digits": {"json_schema": '{"type": "number", "multipleOf": 0.123456789}'},
    "an open group": {"regex": "(a"},
    "enormous repetitions": {"regex": "(((a{999}){999}){999}){999}"},
    "enormous repetitions behind a free beginning": {"regex": "[a-z]{30}(a{20000}){20}"},
    "enormous repetitions in a pattern": {"json_schema": '{"type": "string", "pattern": "^(a{9999}){9999}$"}'},
    "enormous repetitions in rules": {"ebnf": 'root ::= [a-z]{9} a{999}\na ::= b{999}\nb ::= "x"{999}'},
    "a branch without end": {"ebnf": 'root ::= "a" | b\nb ::= "(" b ")"'},
    "a huge count": {"regex": "a{99999999999}"},
    "looking ahead": {"regex": "(?=a)b"},
    "an unknown rule": {"ebnf": "root ::= missing"},
    "no root": {"ebnf": 'start ::= "a"'},
    "endless recursion": {"ebnf": 'root ::= "a" root'},
    "endless recursion through others": {"ebnf": 'root ::= a\na ::= b\nb ::= "(" a ")"'},
    "groups without end": {"ebnf": "root ::= " + "(" * 100_000},
    "a structure without a trigger": {
        "structural_tag": json.dumps({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]})
    },
    "a bad schema in a structure": {
        "structural_tag": json.dumps(
            {"structures": [{"begin": "<a>", "schema": {"type": "x"}, "end": ""}], "triggers": ["<a"]}
        )
    },
    "two at once": {"regex": "a", "ebnf": 'root ::= "a"'},
}


HARD: dict[str, dict[str, Any]] = {
    "ambiguity that grows": {"ebnf": 'root ::= e "."\ne ::= e e e | e e | [a-z ]'},
    "large automata": {"json_schema": json.dumps(SLOW)},
    "repetitions of repetitions": {"regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    "an exponential automaton": {"regex": "(a|b)*a(a|b){500}"},
    "nothing, very often": {"regex": "(((a?){999}){999}){9}b"},
    "ambiguity": {"ebnf": 'root ::= root root | root "a" root | "a"{0,9} | "b"'},
    "left recursion through nothing": {"ebnf": 'root ::= x root "a" | "a"\nx ::= "b"? "c"?'},
    "many alternatives": {"regex": "|".join(f"w{n}[a-z]*{n}" for n in range(4000))},
    "many properties": {"json_schema": json.dumps(MANY)},
}


def settings(model: Path, use: str) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "memory": {"max_total_tokens": 16384},
        "attention": {"use": "torch"},
        "grammar": {"use": use, "compile_timeout": 2, "worker_memory_bytes": 400_000_000, "workers": 1}
        | {"cache_entries": 32},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Served]:
    with serving(settings(model, request.param), env={**os.environ, "OMP_NUM_THREADS": "1"}) as one:
        before = scheduler_pid(one)
        yield one
        assert scheduler_pid(one) == before, "the scheduler has been replaced"
        state = httpx.get(f"{one.address}/server_info", timeout=PATIENCE).json()["scheduler"]
        assert (state["failed_batches"], state["book_errors"], state["plugin_failures"]) == (0, 0, 0)


def scheduler_pid(server: Served) -> int:
    children = psutil.Process(server.process.pid).children()
    (found,) = [one.pid for one in children if "pegboard.core.server.scheduler_process" in one.cmdline()]
    return found


def generate(server: Served, **sampling: Any) -> httpx.Response:
    params = {"temperature": 1, "max_new_tokens": 24, "sampling_seed": 3, **sampling}
    body = {"text": "hello there", "sampling_params": {key: one for key, one in params.items() if one is not None}}
    body["sampling_params"].pop("sampling_seed")  # type: ignore[attr-defined]
    return httpx.post(f"{server.address}/generate", json=body, timeout=PATIENCE)


def others_are_served(server: Served) -> None:
    assert generate(server).status_code == 200
    answer = generate(server, regex="[a-c]{3}")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["text"]) == 3


class TestSglang4574Vllm17313Tgi2280:
    """A bad schema, regex or grammar fails its own request with 400 and the field's name."""

    @pytest.mark.parametrize("what", BAD)
    def test_a_bad_grammar_is_the_clients_mistake(self, server: Served, what: str) -> None:
        answer = generate(server, **BAD[what])
        assert answer.status_code == 400, f"{what}: {answer.status_code} {answer.text[:300]}"
        assert any(field in answer.text for field in BAD[what]), answer.text[:300]
        assert len(answer.text) < 4000

    def test_whoever_runs_beside_them_is_served(self, server: Served) -> None:
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            bad = [threads.submit(generate, server, **case) for case in BAD.values()]
            good = [threads.submit(generate, server, regex=f"[a-z]{{{n}}}") for n in range(1, 9)]
            assert [one.result().status_code for one in bad] == [400] * len(bad)
            assert [len(one.result().json()["text"]) for one in good] == list(range(1, 9))
        others_are_served(server)

    @pytest.mark.parametrize("what", HARD)
    def test_a_hard_one_may_fail_but_alone(self, server: Served, what: str) -> None:
        """Or comes through, where the backend is quick enough: either way the server lives."""
        answer = generate(server, max_new_tokens=60, **HARD[what])
        assert answer.status_code in (200, 400), answer.text[:300]
        others_are_served(server)


class TestSglang7639:
    """Grammars that recurse work; without a backend a grammar is refused, and nothing crashes."""

    def test_a_recursive_grammar_works(self, server: Served) -> None:
        answer = generate(server, ebnf='root ::= "a" | "(" root ")"', max_new_tokens=200)
        assert answer.status_code == 200, answer.text
        text = answer.json()["text"]
        assert text.count("(") >= text.count(")")
        tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
        assert generate(server, json_schema=json.dumps(tree)).status_code == 200

    def test_no_backend_is_no_crash(self, model: Path) -> None:
        with serving(settings(model, "none"), env={**os.environ, "OMP_NUM_THREADS": "1"}) as bare:
            answer = generate(bare, regex="a")
            assert answer.status_code == 400
            assert "grammar.use" in answer.text
            assert generate(bare).status_code == 200


class TestCVE202548944:
    """Odd schemas of tools and of answers are refused, and what is compiled is bounded."""

    @pytest.mark.parametrize(
        "parameters",
        [
            {"type": "string", "pattern": "("},
            {"type": "something", "properties": {}},
            {"$ref": "http://127.0.0.1:9/x"},
            SELF,
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "a{99999}{99999}"}}},
        ],
    )
    def test_a_schema_in_a_chat(self, server: Served, parameters: dict[str, Any]) -> None:
        (served,) = httpx.get(f"{server.address}/v1/models", timeout=PATIENCE).json()["data"]
        body = {
            "model": served["id"],
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 8,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": parameters}},
        }
        answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 400, answer.text[:300]
        assert answer.json()["error"]["type"], answer.text[:300]
        others_are_served(server)

    def test_many_grammars_take_bounded_memory(self, server: Served) -> None:
        """More than the cache holds, all different."""
        process = psutil.Process(scheduler_pid(server))

        def ask(number: int) -> int:
            return generate(server, regex=f"[a-z]{{1,3}}{number}", max_new_tokens=1).status_code

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert set(threads.map(ask, range(80))) == {200}
            before = process.memory_info().rss
            assert set(threads.map(ask, range(80, 240))) == {200}
        assert process.memory_info().rss - before < 64 * 2**20
