"""The Ollama-compatible routes on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient, FakeTokenizer
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.api_ollama.options import OllamaOptions
from pegboard.plugins.api_ollama.router import OllamaRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.media.inputs import MediaPrompt
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.toolkit.chat.media_chats import encoded
from tests.toolkit.chat.templates import TOOLS_AND_PARTS

TEXT = "".join(SCRIPT)
MODEL = "fake-model"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLS = ("((add it", ' up))Well [[add|{"a"', ': 1}]][[add|{"a": 2}]]')
SHOWN = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m.tool_call_id }}|{{ m.name }}"
    "{% for c in m.tool_calls or [] %}|{{ c.id }} {{ c.function.name }} {{ c.function.arguments.a }}{% endfor %}]"
    "{% endfor %}{{ (tools or []) | length }} {{ enable_thinking }} {{ reasoning_effort }}"
)


def ask(method: str, path: str, body: Any = None, **engine: Any) -> tuple[Exchange, FakeEngineClient]:
    """One exchange, and the engine that was asked."""

    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient(**engine)
        ctx = ApiContext(client=client, max_body_bytes=10**6, **fake_parsers())
        app = build_app([("ollama", OllamaRouter(OllamaOptions(), ctx))], max_body_bytes=10**6)
        return await call(app, method, path, body), client

    return asyncio.run(scene())


def get(path: str, **engine: Any) -> Any:
    done, _ = ask("GET", path, **engine)
    assert done.status == 200, done.body
    return done.json()


def whole(path: str = CHAT, **body: Any) -> dict[str, Any]:
    """A whole answer."""
    engine = body.pop("engine", {})
    done, _ = ask("POST", path, {"model": MODEL, "messages": HI, "stream": False, **body}, **engine)
    assert done.status == 200, done.body
    found: dict[str, Any] = done.json()
    return found


def lines(path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream."""
    engine = body.pop("engine", {})
    done, _ = ask("POST", path, {"model": MODEL, "messages": HI, **body}, **engine)
    assert done.status == 200, done.body
    assert done.headers["content-type"] == "application/x-ndjson"
    return [json.loads(one) for one in done.body.splitlines()]


def asked(path: str = CHAT, **body: Any) -> GenerateRequest:
    """What the engine was asked for."""
    engine = body.pop("engine", {})
    done, client = ask("POST", path, {"model": MODEL, "messages": HI, **body}, **engine)
    assert done.status == 200, done.body
    [request] = client.requests
    return request


def refused(path: str = CHAT, *, status: int = 400, **body: Any) -> str:
    """The sentence with which a request is refused, before the engine hears of it."""
    done, client = ask("POST", path, {"model": MODEL, "messages": HI, **body})
    assert (done.status, client.requests) == (status, []), done.body
    error: dict[str, str] = done.json()
    assert error.keys() == {"error"}
    return error["error"]


def prompt(**body: Any) -> object:
    return asked(engine={"tokenizer": FakeTokenizer(template=SHOWN)}, **body).prompt


class TestAnswers:
    def test_lines_of_a_chat(self) -> None:
        *pieces, last = lines()
        assert "".join(one["message"]["content"] for one in pieces) == TEXT
        assert len(pieces) >= len(SCRIPT)
        assert all(not one["done"] and one["message"]["role"] == "assistant" for one in pieces)
        assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
        assert (last["prompt_eval_count"], last["eval_count"]) == (len("user: Hi\nassistant:"), len(TEXT))
        durations = [last[f"{name}_duration"] for name in ("prompt_eval", "eval", "load", "total")]
        assert durations[0] + durations[1] + durations[2] == durations[3] > 0
        assert {one["model"] for one in (*pieces, last)} == {MODEL}

    def test_a_whole_chat(self) -> None:
        found = whole()
        assert (found["message"], found["done"]) == ({"role": "assistant", "content": TEXT}, True)
        assert whole(engine={"finish_reason": {"type": "length"}})["done_reason"] == "length"

    def test_a_prompt(self) -> None:
        *pieces, last = lines(GENERATE, prompt="Hi")
        assert "".join(one["response"] for one in pieces) == whole(GENERATE, prompt="Hi")["response"] == TEXT
        assert "message" not in last
        thought = whole(
            GENERATE,
            prompt="Hi",
            engine={
                "script": (
                    "((h",
                    "m))so",
                )
            },
        )
        assert (thought["thinking"], thought["response"]) == ("hm", "so")

    def test_calls_and_thinking(self) -> None:
        engine = {"script": CALLS}
        functions = [{"index": index, "name": "add", "arguments": {"a": index + 1}} for index in range(2)]
        message = whole(tools=[TOOL], engine=engine)["message"]
        assert (message["content"], message["thinking"]) == ("Well ", "add it up")
        assert [one["function"] for one in message["tool_calls"]] == functions
        *pieces, _ = [one["message"] for one in lines(tools=[TOOL], engine=engine)]
        assert "".join(one.get("thinking", "") for one in pieces) == "add it up"
        called = [one["tool_calls"] for one in pieces if "tool_calls" in one]
        assert [one["function"] for [one] in called] == functions, "each call is told once, and whole"
        assert len({one["id"] for [one] in called}) == 2

    def test_a_call_whose_arguments_are_no_json_is_not_one_without_arguments(self) -> None:
        engine = {"script": ('[[add|{"a": Rome}]][[add|]][[add|{}]]',)}
        found = whole(tools=[TOOL], engine=engine)
        arguments = [one["function"]["arguments"] for one in found["message"]["tool_calls"]]
        assert arguments == [{"INVALID_JSON": '{"a": Rome}'}, {}, {}]

    def test_a_call_that_was_cut_is_left_out(self) -> None:
        engine = {"script": ('[[add|{"a": 1}]][[add|{"a"',), "finish_reason": {"type": "length"}}
        found = whole(tools=[TOOL], engine=engine)
        assert [one["function"]["arguments"] for one in found["message"]["tool_calls"]] == [{"a": 1}]
        assert found["done_reason"] == "length"

    def test_a_stream_that_fails_ends_with_an_error(self) -> None:
        *_, last = lines(engine={"fail_at": 1})
        assert last.keys() == {"error"}

    @pytest.mark.parametrize(("path", "empty"), [(CHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
    def test_without_a_prompt_the_model_is_loaded(self, path: str, empty: dict[str, Any]) -> None:
        for keep, reason in ((None, "load"), (0, "unload"), ("5m", "load")):
            done, client = ask("POST", path, {"model": MODEL, **empty, "keep_alive": keep})
            assert (done.json()["done_reason"], client.requests) == (reason, [])


class TestWhatIsAsked:
    def test_options(self) -> None:
        options = {"num_predict": 5, "temperature": 0.5, "top_k": 3, "seed": 7, "repeat_penalty": 1.5, "stop": ["x"]}
        sampling = asked(options={**options, "num_ctx": 4096, "num_thread": 2, "mirostat": 0}).sampling
        assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k) == (5, 0.5, 3)
        assert (sampling.seed, sampling.repetition_penalty, sampling.stop) == (7, 1.5, ("x",))
        left = asked(options={"num_predict": -1}).sampling
        assert left.max_new_tokens is None
        assert {"repetition_penalty", "temperature"} <= set(left.unset)
        assert left.filled({"max_new_tokens": 7}).max_new_tokens is None, "until the context is full"
        for given in ({}, {"num_predict": None}):
            assert asked(options=given).sampling.filled({"max_new_tokens": 7}).max_new_tokens == 7
        assert asked(options={"num_predict": 5}).sampling.filled({"max_new_tokens": 7}).max_new_tokens == 5

    def test_the_format(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        written = '{"type":"object","properties":{"a":{"type":"integer"}}}'
        assert asked(format=schema).sampling.grammar == Grammar("json_schema", written)
        found = asked(format="json").sampling.grammar
        assert found is not None
        assert found.kind == "json_object"
        assert asked(format="").sampling.grammar is None

    def test_thinking(self) -> None:
        assert prompt(think=True) == "[user|Hi|||]0 True "
        assert prompt(think=False) == "[user|Hi|||]0 False "
        assert prompt(think="low") == "[user|Hi|||]0 True low"

    def test_a_conversation(self) -> None:
        calls = [{"function": {"name": name, "arguments": {"a": a}}} for name, a in (("add", 1), ("mul", 2))]
        messages = [
            {"role": "system", "content": "Be."},
            *HI,
            {"role": "assistant", "thinking": "Hm.", "tool_calls": calls},
            {"role": "tool", "tool_name": "mul", "content": "4"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "own", **calls[0]}]},
            {"role": "tool", "tool_call_id": "own", "content": "3"},
        ]
        assert prompt(messages=messages, tools=[TOOL]) == (
            "[system|Be.|||][user|Hi|||][assistant||Hm.|||000000001 add 1|000000002 mul 2]"
            "[tool|4||000000002|mul][tool|2||000000001|add][assistant|||||own add 1][tool|3||own|add]1  "
        )

    def test_prompts(self) -> None:
        assert asked(GENERATE, prompt="Hi", system="Be.").prompt == "system: Be.\nuser: Hi\nassistant:"
        raw = asked(GENERATE, prompt="Hi", raw=True)
        assert (raw.prompt, raw.add_special_tokens) == ("Hi", True)
        plain = {"tokenizer": FakeTokenizer(has_chat_template=False)}
        assert asked(GENERATE, prompt="Hi", system="Be.", engine=plain).prompt == "Be.\n\nHi"

    def test_images(self) -> None:
        engine = {"tokenizer": FakeTokenizer(template=TOOLS_AND_PARTS), "media": fake_processor()}
        message = {"role": "user", "content": "What is it?", "images": [encoded(1)]}
        for path, body in ((CHAT, {"messages": [message]}), (GENERATE, {"prompt": "What?", "images": [encoded(1)]})):
            done, client = ask("POST", path, {"model": MODEL, **body}, **engine)
            assert done.status == 200, done.body
            assert isinstance(client.requests[0].prompt, MediaPrompt)
        assert "messages.0.images.0" in refused(messages=[{**message, "images": [5]}])
        assert "image" in refused(messages=[message]), "this model reads text alone"

    def test_names(self) -> None:
        assert whole(model=f"{MODEL}:latest")["model"] == MODEL
        assert "'other'" in refused(model="other", status=404)
        assert "'other:latest'" in refused(model="other:latest", status=404)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [{"role": "critic", "content": "Hm"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "images": 5}]}, "messages.0.images"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [5]}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"think": "much"}, "think"),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
        (CHAT, {"options": {"mirostat": 1}}, "mirostat"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (GENERATE, {"prompt": "Hi", "context": [1, 2]}, "context"),
        (GENERATE, {"prompt": "Hi", "suffix": "ho"}, "suffix"),
        (GENERATE, {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "Hi", "raw": True, "images": [encoded(1)]}, "images"),
        ("/api/embed", {"input": []}, ""),
        ("/api/embed", {"input": ["a", ""]}, "input"),
        ("/api/embed", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/api/embed", {"input": ["a"] * 2049}, "input"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], named: str) -> None:
    if named:
        assert named in refused(path, **body)
    else:
        assert whole(path, **body)["embeddings"] == []


def test_the_engines_refusals_name_the_options() -> None:
    refusal = InvalidRequest("max_new_tokens is too large", param="max_new_tokens")
    done, _ = ask("POST", CHAT, {"model": MODEL, "messages": HI}, refuse=refusal)
    assert done.status == 400
    assert "options.num_predict" in done.json()["error"]


class TestEmbeddings:
    def test_texts(self) -> None:
        one, two = whole("/api/embed", input="a"), whole("/api/embed", input=["a", "bc"])
        assert two["embeddings"][0] == one["embeddings"][0]
        assert (len(two["embeddings"]), two["prompt_eval_count"]) == (2, 3)

    def test_what_the_older_route_asks_for(self) -> None:
        done, client = ask("POST", "/api/embeddings", {"model": MODEL, "prompt": "a"})
        assert isinstance(done.json()["embedding"][0], float)
        assert not client.embedded[0].normalize


class TestModels:
    def test_which_there_are(self) -> None:
        for path, own in (("/api/tags", {"modified_at"}), ("/api/ps", {"expires_at", "size_vram", "context_length"})):
            [found] = get(path)["models"]
            assert found["name"] == found["model"] == f"{MODEL}:latest"
            assert found.keys() == {"name", "model", "size", "digest", "details"} | own
            assert len(found["digest"]) == 64

    def test_what_one_can_do(self) -> None:
        found = whole("/api/show")
        assert found["capabilities"] == ["completion", "tools", "thinking", "embedding"]
        kind = found["model_info"]["general.architecture"]
        assert found["model_info"][f"{kind}.context_length"] > 0
        assert found["template"] == FakeTokenizer().chat_templates["default"]
        assert "vision" in whole("/api/show", engine={"media": fake_processor()})["capabilities"]
        plain = {"tokenizer": FakeTokenizer(has_chat_template=False)}
        assert whole("/api/show", engine=plain)["capabilities"] == ["completion", "embedding"]
        assert whole("/api/show", name=MODEL, model="")["details"]["format"] == "safetensors"
        refused("/api/show", model="other", status=404)

    def test_the_version(self) -> None:
        assert get("/api/version") == {"version": "0.13.0"}
