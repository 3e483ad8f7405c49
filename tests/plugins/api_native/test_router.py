"""What /generate asks of the engine, and the form of its answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pegboard.conformance.asgi import Exchange
from pegboard.conformance.fake_client import SCRIPT
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from tests.plugins.api_native.asking import CheckedClient, Server, asked, played

TEXT = "".join(SCRIPT)


def generate(**body: Any) -> tuple[Any, CheckedClient]:
    done, client = asked("/generate", body)
    assert done.status == 200, done.body
    return done.json(), client


def test_one_answer() -> None:
    answer, client = generate(text="Hi", rid="r1", sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert answer["text"] == TEXT
    assert answer["output_ids"] == [ord(char) for char in TEXT]
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "stop", "matched": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(TEXT), 2)
    assert meta["cached_tokens_details"] == {"device": 2}
    assert {"num_retractions", "weight_version", "e2e_latency"} <= meta.keys()
    assert "input_token_logprobs" not in meta
    assert "hidden_states" not in meta
    assert client.requests[0].sampling.max_new_tokens == 5
    assert client.requests[0].sampling.greedy


def test_defaults_are_the_fields() -> None:
    _, client = generate(text="Hi")
    sampling = client.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (128, 1.0, 1.0)
    assert client.requests[0].logprobs is None


def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    lists = {"stop": "x", "stop_regex": ["a+"], "stop_token_ids": [5], "logit_bias": {"7": -1.5}, "sampling_seed": 9}
    _, client = generate(text="Hi", sampling_params={**fields, **lists})
    sampling = client.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.stop, sampling.stop_regex, sampling.stop_token_ids) == (("x",), ("a+",), (5,))
    assert (sampling.logit_bias, sampling.seed) == ({7: -1.5}, 9)


@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("json_schema", '{"type": "null"}', Grammar("json_schema", '{"type":"null"}')),
        ("json_schema", {"type": "null"}, Grammar("json_schema", '{"type":"null"}')),
        ("regex", "a+", Grammar("regex", "a+")),
        ("ebnf", 'root ::= "a"', Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_grammars_reach_the_engine(field: str, value: Any, grammar: Grammar) -> None:
    _, client = generate(text="Hi", sampling_params={field: value, "n": 2})
    assert [one.sampling.grammar for one in client.requests] == [grammar] * 2


def test_structural_tags_reach_the_engine() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}
    _, client = generate(text="Hi", sampling_params={"structural_tag": json.dumps(tag)})
    grammar = client.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    assert json.loads(grammar.source)["triggers"] == ["<f>"]


@pytest.mark.parametrize("outside", [True, False])
def test_processors_are_chosen_by_name(outside: bool) -> None:
    chosen = {"custom_logit_processor": "dry"}
    sampling = {"custom_params": {"multiplier": 2.0}, **({} if outside else chosen)}
    _, client = generate(text="Hi", sampling_params=sampling, **(chosen if outside else {}))
    assert client.requests[0].sampling.extra == {"dry": {"multiplier": 2.0}}


def test_the_rest_reaches_the_engine() -> None:
    _, client = generate(text="Hi", priority=3, cache_salt="s", extra_key="k", params={"gate": {"x": 1}})
    request = client.requests[0]
    assert (request.priority, request.params) == (3, {"gate": {"x": 1}})
    assert "s" in request.cache_salt
    assert "k" in request.cache_salt


def test_token_ids_are_a_prompt() -> None:
    _, client = generate(input_ids=[1, 2, 3])
    assert client.requests[0].prompt == [1, 2, 3]


def test_lists_are_batches() -> None:
    answers, client = generate(
        text=["a", "b"], rid=["x", "y"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    )
    assert [one["meta_info"]["id"] for one in answers] == ["x", "y"]
    assert [one.sampling.max_new_tokens for one in client.requests] == [1, 2]
    answers, _ = generate(input_ids=[[1], [2, 3]])
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [1, 2]
    answers, _ = generate(text=["a"])
    assert isinstance(answers, list)


def test_what_a_batch_wants_may_differ() -> None:
    answers, client = generate(
        text=["ab", "cd"],
        return_logprob=[True, False],
        top_logprobs_num=[1, 0],
        logprob_start_len=[0, -1],
        token_ids_logprob=[[90], []],
        return_hidden_states=[False, True],
    )
    first, second = client.requests
    assert (first.logprobs, first.logprob_start, first.token_ids_logprob) == (1, 0, (90,))
    assert (second.logprobs, second.logprob_start, second.token_ids_logprob) == (None, None, ())
    assert [one.return_hidden_states for one in client.requests] == [False, True]
    assert "input_token_logprobs" in answers[0]["meta_info"]
    assert answers[1]["meta_info"]["hidden_states"] == [[0.25, -0.5]] * len(TEXT)


def test_n_answers_have_ids_and_seeds_of_their_own() -> None:
    answers, client = generate(text="a", rid="r", sampling_params={"n": 3, "seed": 7})
    assert [one["meta_info"]["id"] for one in answers] == ["r_0", "r_1", "r_2"]
    assert [one.sampling.seed for one in client.requests] == [7, 8, 9]
    answers, _ = generate(text=["a", "b"], rid=["r", "s"], sampling_params=[{"n": 2}, {}])
    assert [one["meta_info"]["id"] for one in answers] == ["r_0", "r_1", "s"]


def test_stream_is_cumulative_and_ends_in_done() -> None:
    done, _ = asked("/generate", {"text": "Hi", "stream": True, "return_logprob": True, "logprob_start_len": 0})
    *events, last = done.events()
    assert last == "[DONE]"
    parts = [json.loads(one) for one in events]
    assert [one["text"] for one in parts] == [SCRIPT[0], SCRIPT[0] + SCRIPT[1], TEXT]
    assert parts[0]["meta_info"]["finish_reason"] is None
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    logprobs = [entry for part in parts for entry in part["meta_info"]["output_token_logprobs"]]
    assert [token for _, token, _ in logprobs] == parts[-1]["output_ids"]
    assert [len(part["meta_info"].get("input_token_logprobs", ())) for part in parts] == [2, 0, 0]


def test_what_stages_tell() -> None:
    told = {"green": [1, 0]}
    assert asked("/generate", {"text": "Hi"}, client=CheckedClient(extra=told))[0].json()["meta_info"]["extra"] == told
    *events, _ = asked("/generate", {"text": "Hi", "stream": True}, client=CheckedClient(extra=told))[0].events()
    metas = [json.loads(one)["meta_info"] for one in events]
    assert [one.get("extra") for one in metas] == [None] * (len(metas) - 1) + [told]


def test_streamed_batches_carry_an_index() -> None:
    done, _ = asked("/generate", {"text": ["a", "b"], "stream": True})
    *events, _last = [json.loads(one) if one != "[DONE]" else {} for one in done.events()]
    final = {one["index"]: one["text"] for one in events}
    assert final == {0: TEXT, 1: TEXT}


def test_logprobs_are_value_id_text() -> None:
    answer, _ = generate(
        text="Hi", return_logprob=True, top_logprobs_num=2, token_ids_logprob=[90], return_text_in_logprobs=True
    )
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ord("O"), "O"]
    assert meta["output_top_logprobs"][0] == [[-0.5, 65, "A"], [-1.5, 66, "B"]]
    assert meta["output_token_ids_logprobs"][0] == [[-9.0, 90, "Z"]]
    assert len(meta["output_token_logprobs"]) == len(answer["output_ids"])
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"], meta["input_token_ids_logprobs"]) == ([], [], [])
    answer, _ = generate(text="Hi", return_logprob=True)
    assert answer["meta_info"]["output_token_logprobs"][0] == [-0.5, ord("O"), None]
    assert "output_top_logprobs" not in answer["meta_info"]
    assert "output_token_ids_logprobs" not in answer["meta_info"]


def test_logprobs_of_the_prompt_begin_with_null() -> None:
    wanted = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [90], "return_text_in_logprobs": True}
    meta = generate(text="Hi!", logprob_start_len=0, **wanted)[0]["meta_info"]
    assert meta["input_token_logprobs"] == [[None, ord("H"), "H"], [-0.5, ord("i"), "i"], [-0.5, ord("!"), "!"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 65, "A"]], [[-0.5, 65, "A"]]]
    assert meta["input_token_ids_logprobs"] == [None, [[-9.0, 90, "Z"]], [[-9.0, 90, "Z"]]]
    meta = generate(text="Hi!", logprob_start_len=2, **wanted)[0]["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, ord("!"), "!"]]
    assert meta["input_top_logprobs"] == [[[-0.5, 65, "A"]]]


def test_numbers_that_json_does_not_know_are_null() -> None:
    class Impossible(CheckedClient):
        async def submit(self, request: Any) -> Any:
            stream = await super().submit(request)
            stream._logprobs = lambda ids: [(float("-inf"), one, [(float("-inf"), one)]) for one in ids]  # type: ignore[attr-defined]
            return stream

    async def scene(server: Server) -> None:
        done = await server.post("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 1})
        meta = done.json()["meta_info"]
        assert meta["output_token_logprobs"][0] == [None, ord("O"), None]
        assert b"Infinity" not in done.body

    async def play() -> None:
        await scene(Server.of(Impossible()))

    asyncio.run(play())


@pytest.mark.parametrize("begun", [False, True])
def test_errors_after_acceptance_name_the_field(begun: bool) -> None:
    """Whether or not a stream has begun by then."""

    class Late(CheckedClient):
        async def submit(self, request: Any) -> Any:
            stream = await super().submit(request)
            whole = stream._chunks()  # type: ignore[attr-defined]

            async def chunks() -> Any:
                if begun:
                    yield await anext(whole)
                raise InvalidRequest("no such grammar", param="regex", code="invalid_grammar")

            stream._chunks = chunks  # type: ignore[attr-defined]
            return stream

    async def play(*, stream: bool) -> Exchange:
        body = {"text": "a", "sampling_params": {"regex": "a"}, "stream": stream}
        return await Server.of(Late()).post("/generate", body)

    streamed = asyncio.run(play(stream=True))
    if begun:
        assert json.loads(streamed.events()[1])["error"]["param"] == "sampling_params.regex"
        assert streamed.events()[-1] == "[DONE]"
    else:
        assert (streamed.status, streamed.json()["error"]["param"]) == (400, "sampling_params.regex")
    whole = asyncio.run(play(stream=False))
    assert (whole.status, whole.json()["error"]["param"]) == (400, "sampling_params.regex")


def test_errors_of_the_engine_name_the_field_as_it_is_called_here() -> None:
    async def scene(server: Server) -> None:
        for engine, here in {
            "prompt": "text",
            "logprobs": "top_logprobs_num",
            "temperature": "sampling_params.temperature",
            "custom_params.dry.x": "sampling_params.custom_params.dry.x",
            "rid": "rid",
            None: None,
        }.items():
            server.client.refuse = InvalidRequest("no", param=engine, status=429, code="why")
            done = await server.post("/generate", {"text": "a"})
            assert (done.status, done.json()["error"]["param"], done.json()["error"]["code"]) == (429, here, "why")

    played(scene)
