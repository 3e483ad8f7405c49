"""Formats of answers over HTTP, by a model that was taught them: harmony with OpenAI's client, and Ollama's routes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pegboard.conformance.servers import Served
from tests.e2e.clients import KEY, MODEL, assert_balanced, teach, tiny_model, tiny_server

pytestmark = pytest.mark.slow

THINK, CALL = "What is two and two?", "What weather is it?"
TURN = "<|end|><|start|>assistant"
CITY = {"city": "Rome"}
THOUGHT = "Add it up, then say it."
LESSONS = {
    f"{THINK}{TURN}": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>"
    "Four.<|im_end|>",
    f"{CALL}{TURN}": "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{json.dumps(CITY)}<|im_end|>",
    f"sunny{TURN}": "<|channel|>final<|message|>It is sunny.<|im_end|>",
}
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}"
    "{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}<|end|>"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|start|>assistant{% for c in m.tool_calls or [] %} to=functions."
    "{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% elif m.role == 'tool' %}<|start|>tool<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def write_template(model: Path) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    write_template(model)
    teach(model, LESSONS, steps=200)
    with tiny_server(model, apis=["openai", "ollama", "native", "anthropic"]) as one:
        yield one
        assert_balanced(one)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120) as one:
        yield one


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.address, headers={"Authorization": f"Bearer {KEY}"}, timeout=120, trust_env=False
    ) as one:
        yield one


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    """The message of a chat, whose stream has the same in it."""
    options: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 300, **more}
    choice = client.chat.completions.create(**options).choices[0]
    chunks = [one.choices[0] for one in client.chat.completions.create(**options, stream=True)]
    assert "".join(one.delta.content or "" for one in chunks) == (choice.message.content or "")
    thoughts = [getattr(one.delta, "reasoning_content", None) or "" for one in chunks]
    assert "".join(thoughts) == (getattr(choice.message, "reasoning_content", None) or "")
    parts = [one.function.arguments or "" for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert "".join(parts) == "".join(one.function.arguments for one in choice.message.tool_calls or [])
    return choice.message


def test_harmony_in_chats(client: openai.OpenAI) -> None:
    message = chat(client, said(THINK))
    assert (message.reasoning_content, message.content) == (THOUGHT, "Four.")
    called = chat(client, said(CALL), tools=[TOOL])
    [call] = called.tool_calls
    assert (called.reasoning_content, call.function.name) == ("Look.", "weather")
    assert json.loads(call.function.arguments) == CITY
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    assert chat(client, [*said(CALL), called, result], tools=[TOOL]).content == "It is sunny."
    required = chat(client, said(CALL), tools=[TOOL], tool_choice="required")
    assert [one.function.name for one in required.tool_calls][:1] == ["weather"]


def test_harmony_in_responses(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 300}
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    answer = client.responses.create(**options, input=THINK)
    assert [one.type for one in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "Four."
    with client.responses.stream(**options, input=CALL, tools=tools) as stream:
        kinds = {one.type for one in stream}
        final = stream.get_final_response()
    assert [one.type for one in final.output] == ["reasoning", "function_call"]
    assert "response.function_call_arguments.done" in kinds
    call: Any = final.output[1]
    assert json.loads(call.arguments) == CITY
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = client.responses.create(**options, input=results, tools=tools, previous_response_id=final.id)
    assert after.output_text == "It is sunny."


def test_the_effort_is_in_the_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    for effort in ("low", "high"):
        body = {"model": MODEL, "messages": said(THINK), "reasoning_effort": effort}
        found = http.post("/v1/chat/completions/render", json=body).json()
        assert found["prompt"].startswith(f"<|start|>system<|message|>Reasoning: {effort}<|end|>")


def test_a_budget_ends_the_thought(client: openai.OpenAI) -> None:
    """At the same token whatever else is asked for."""
    whole = chat(client, said(THINK), extra_body={"thinking_token_budget": 300})
    assert whole.reasoning_content == THOUGHT
    none = chat(client, said(THINK), extra_body={"thinking_token_budget": 0})
    assert not getattr(none, "reasoning_content", None)
    options: Any = {"model": MODEL, "messages": said(THINK), "temperature": 0, "max_tokens": 60}
    few = client.chat.completions.create(**options, n=2, extra_body={"thinking_token_budget": 3})
    texts = [getattr(one.message, "reasoning_content", "") for one in few.choices]
    assert texts[0] == texts[1] != ""
    assert THOUGHT.startswith(texts[0])
    assert texts[0] != THOUGHT
    drawn = client.chat.completions.create(**options, logprobs=True, extra_body={"thinking_token_budget": 3})
    assert getattr(drawn.choices[0].message, "reasoning_content", "") == texts[0]


def test_a_stop_string_ends_an_answer_whose_thought_was_ended(client: openai.OpenAI) -> None:
    """Whether it stands in the thought or behind it; the marker that ended the thought is no part of it."""
    options: Any = {"model": MODEL, "messages": said(THINK), "temperature": 0, "max_tokens": 60}
    few = client.chat.completions.create(**options, extra_body={"thinking_token_budget": 3}).choices[0].message
    thought, answer = getattr(few, "reasoning_content", ""), few.content or ""
    assert len(thought) > 2
    assert len(answer) > 2
    for stop, expected in ((answer[1:], (thought, answer[:1])), (thought[1:], (thought[:1], ""))):
        [cut] = client.chat.completions.create(**options, stop=stop, extra_body={"thinking_token_budget": 3}).choices
        assert (getattr(cut.message, "reasoning_content", ""), cut.message.content or "") == expected
        assert cut.finish_reason == "stop"


def test_a_budget_of_messages_ends_the_thought(client: openai.OpenAI, http: httpx.Client) -> None:
    few = chat(client, said(THINK), extra_body={"thinking_token_budget": 3})
    body = {"model": MODEL, "messages": said(THINK), "max_tokens": 300, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 3}
    told = http.post("/v1/messages", json={**body, "thinking": thinking}).json()["content"]
    assert [one.get("thinking") or one.get("text") for one in told] == [few.reasoning_content, few.content]


def test_ollama(http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": said(CALL), "tools": [TOOL], "options": {"temperature": 0}}
    with http.stream("POST", "/api/chat", json=body) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    thought = "".join(one["message"].get("thinking", "") for one in lines)
    [call] = [call for one in lines for call in one["message"].get("tool_calls", ())]
    assert (thought, call["function"]["name"], call["function"]["arguments"]) == ("Look.", "weather", CITY)
    assert lines[-1]["done_reason"] == "stop"
    asked = [*body["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    told = [*asked, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    done = http.post("/api/chat", json={**body, "messages": told, "stream": False}).json()
    assert done["message"]["content"] == "It is sunny."
    generated = http.post("/api/generate", json={**body, "prompt": THINK, "stream": False}).json()
    assert (generated["thinking"], generated["response"]) == (THOUGHT, "Four.")
    shown = http.post("/api/show", json={"model": MODEL}).json()
    assert shown["capabilities"][:3] == ["completion", "tools", "thinking"]
    assert http.get("/api/tags").json()["models"][0]["name"] == f"{MODEL}:latest"
    assert http.post("/api/chat", json={**body, "model": "other"}).json().keys() == {"error"}


def test_what_open_webui_asks_for(http: httpx.Client) -> None:
    """As its routers `ollama` and `openai` send it."""
    http.headers.update({"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Role": "admin"})
    assert [int(part) for part in http.get("/api/version").json()["version"].split(".")] > [0, 6, 4]
    [tag], [loaded] = (http.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
    assert tag["model"] == loaded["name"]
    assert datetime.datetime.fromisoformat(loaded["expires_at"]).tzinfo is not None
    options = {"temperature": 0, "num_ctx": 2048, "num_predict": 100, "repeat_last_n": 64}
    body = {"model": tag["model"], "messages": said(THINK), "stream": True, "options": options, "keep_alive": "5m"}
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).iter_lines()]
    assert "".join(one["message"]["content"] for one in lines) == "Four."
    assert lines[-1]["eval_count"] > 0
    unloaded = http.post("/api/generate", json={"model": tag["model"], "keep_alive": 0, "prompt": ""}).json()
    assert unloaded["done_reason"] == "unload"
    [model] = http.get("/v1/models").json()["data"]
    chat_body = {"model": model["id"], "messages": said(THINK), "temperature": 0}
    title = http.post("/v1/chat/completions", json={**chat_body, "stream": False, "max_completion_tokens": 1000})
    assert title.json()["choices"][0]["message"]["content"] == "Four."
    streamed = {**chat_body, "stream": True, "stream_options": {"include_usage": True}}
    events = http.post("/v1/chat/completions", json=streamed).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] > 0
