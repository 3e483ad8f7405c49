"""vLLM's and SGLang's names for constraints: what the engine is asked, what is refused, and tokens in the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.api_openai import constraints
from pegboard.toolkit.grammars.gbnf import Choice, Literal, parse, to_gbnf
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, MESSAGES, post, refused, stream
from tests.plugins.field_tables import PROCESSORS

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Hi"}}
ROUTES = pytest.mark.parametrize("path", BODIES)
ODD = ['say "no"', "a\\b", "new\nline", "[x]*.?|(y)", "é 🎉"]


def asked(path: str, **body: Any) -> Any:
    _, client = post(path, {**BODIES[path], **body}, features=PROCESSORS)  # type: ignore[dict-item]
    return client.requests[0].sampling


@ROUTES
@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_json": TEXT}, Grammar("json_schema", TEXT)),
        ({"json_schema": TEXT}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"guided_json_object": True}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json_object")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, Grammar("regex", "a+")),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {"grammar": 'root ::= "a"', "backend": "x"}}, Grammar("ebnf", 'root ::= "a"')),
    ],
    ids=str,
)
def test_grammars(path: str, body: dict[str, Any], grammar: Grammar) -> None:
    assert asked(path, **body).grammar == grammar


def test_a_structural_tag_as_vllm_has_it() -> None:
    assert asked(CHAT, structured_outputs={"structural_tag": json.dumps(TAG)}).grammar.kind == "structural_tag"


@ROUTES
def test_choices_become_a_grammar_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(rules: Any) -> str:
        made.append(rules)
        return to_gbnf(rules)

    monkeypatch.setattr(constraints, "to_gbnf", counted)
    assert asked(path, guided_choice=["a", "b"]).grammar is not None
    assert len(made) == 1, "it takes time, and the event loop waits"


@ROUTES
@pytest.mark.parametrize("body", [{"guided_choice": ODD}, {"structured_outputs": {"choice": [*ODD, ODD[0]]}}], ids=str)
def test_choices_are_these_texts_whatever_is_in_them(path: str, body: dict[str, Any]) -> None:
    grammar = asked(path, **body).grammar
    assert grammar.kind == "ebnf"
    assert parse(grammar.source) == {"root": Choice(tuple(map(Literal, ODD)))}


@ROUTES
def test_words_and_tokens(path: str) -> None:
    found = asked(path, bad_words=["no"], allowed_token_ids=[65, 66], include_stop_str_in_output=True)
    assert found.extra == {"bad_words": {"words": ["no"]}, "allowed_token_ids": {"ids": [65, 66]}}
    assert found.no_stop_trim is True


@ROUTES
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        pytest.param({"guided_choice": ["a"] * 4097}, "guided_choice", id="many choices"),
        pytest.param({"guided_choice": ["a" * 40_000, "b" * 40_000]}, "guided_choice", id="long choices"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "no json"}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0x110000]}, "allowed_token_ids"),
        pytest.param({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", id="many token ids"),
        ({"bad_words": ["a"], "custom_params": {"bad_words": {"words": ["b"]}}}, "bad_words"),
        ({"return_token_ids": True, "session_params": {"id": "s"}}, "return_token_ids"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    assert refused(path, {**BODIES[path], **body}, features=PROCESSORS)["param"] == param  # type: ignore[dict-item]


@ROUTES
@pytest.mark.parametrize("body", [{"bad_words": ["a"]}, {"allowed_token_ids": [5]}], ids=str)
def test_a_server_without_the_processor_says_so(path: str, body: dict[str, Any]) -> None:
    error = refused(path, {**BODIES[path], **body})  # type: ignore[dict-item]
    [name] = body
    assert (error["param"], error["code"]) == (name, "not_available")


def test_token_ids_of_a_chat() -> None:
    answer, client = post(CHAT, {"messages": MESSAGES, "n": 2, "return_token_ids": True})
    prompt = list(map(ord, "user: Hi\nassistant:"))
    assert answer["prompt_token_ids"] == prompt
    assert [one.prompt for one in client.requests] == [prompt, prompt]
    for choice in answer["choices"]:
        assert choice["token_ids"] == list(map(ord, choice["message"]["content"]))


def test_token_ids_of_texts() -> None:
    answer, _ = post(COMPLETIONS, {"prompt": ["ab", "c"], "n": 2, "best_of": 3, "return_token_ids": True})
    assert [one["prompt_token_ids"] for one in answer["choices"]] == [[97, 98], [97, 98], [99], [99]]
    for choice in answer["choices"]:
        assert choice["token_ids"] == list(map(ord, choice["text"]))


def test_token_ids_of_a_streamed_chat() -> None:
    chunks = stream(CHAT, {"messages": MESSAGES, "return_token_ids": True})
    assert chunks[0]["prompt_token_ids"] == list(map(ord, "user: Hi\nassistant:"))
    assert not any("prompt_token_ids" in one for one in chunks[1:])
    choices = [one["choices"][0] for one in chunks]
    text = "".join(one["delta"].get("content") or "" for one in choices)
    assert [token for one in choices for token in one.get("token_ids", [])] == list(map(ord, text))


def test_token_ids_of_streamed_texts() -> None:
    chunks = [one["choices"][0] for one in stream(COMPLETIONS, {"prompt": [[97, 98], [99]], "return_token_ids": True})]
    for index, prompt in enumerate([[97, 98], [99]]):
        own = [one for one in chunks if one["index"] == index]
        assert [one["prompt_token_ids"] for one in own if "prompt_token_ids" in one] == [prompt]
        text = "".join(one["text"] for one in own)
        assert [token for one in own for token in one["token_ids"]] == list(map(ord, text))


@ROUTES
def test_without_asking_there_are_none(path: str) -> None:
    assert "token_ids" not in json.dumps(post(path, BODIES[path])[0])  # type: ignore[arg-type]
    assert "token_ids" not in json.dumps(stream(path, BODIES[path]))  # type: ignore[arg-type]
