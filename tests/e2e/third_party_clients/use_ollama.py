"""Ollama's own client, sync and async."""

from __future__ import annotations

import json
from typing import Any

import ollama
from common import ADDRESS, BOTH, CALL_WHO, KEY, MODEL, RESULTS, THANKS, WHO, ask, chat_tools, said, tell

HEADERS = {"Authorization": f"Bearer {KEY}"}
CLIENT = ollama.Client(host=ADDRESS, headers=HEADERS)
COLD: Any = {"model": MODEL, "options": {"temperature": 0, "num_predict": 200}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@ask
async def chat() -> Any:
    parts = CLIENT.chat(messages=said(THANKS), stream=True, **COLD)
    found = await ollama.AsyncClient(host=ADDRESS, headers=HEADERS).chat(messages=said(THANKS), **COLD)
    return ["".join(one.message.content or "" for one in parts), found.message.content]


@ask
def tool_loop() -> Any:
    ends = []
    for stream in (False, True):
        answer = CLIENT.chat(messages=said(BOTH), tools=chat_tools(), stream=stream, **COLD)
        parts = list(answer) if stream else [answer]
        calls = [call for one in parts for call in one.message.tool_calls or []]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [
            {"role": "tool", "tool_name": one.function.name, "content": RESULTS[one.function.name]} for one in calls
        ]
        last = CLIENT.chat(messages=[*said(BOTH), message, *results], tools=chat_tools(), **COLD)
        ends.append([{one.function.name: one.function.arguments for one in calls}, last.message.content])
    return ends


@ask
def format() -> Any:  # noqa: A001 - what it is called there
    schema = CLIENT.chat(messages=said(WHO), format=PERSON, **COLD).message.content
    plain = CLIENT.chat(messages=said(WHO), format="json", **COLD).message.content
    return [json.loads(schema), json.loads(plain)]


@ask
def generate() -> Any:
    parts = CLIENT.generate(prompt=THANKS, stream=True, **COLD)
    return ["".join(one.response for one in parts), CLIENT.generate(prompt=THANKS, **COLD).response]


@ask
def models() -> Any:
    shown = CLIENT.show(MODEL)
    return [CLIENT.list().models[0].model, "tools" in shown.capabilities, CLIENT.ps().models[0].model]


@ask
def errors() -> Any:
    def error(client: ollama.Client, **options: Any) -> Any:
        try:
            client.chat(messages=said(CALL_WHO), **options)
        except ollama.ResponseError as found:
            return [type(found).__name__, found.status_code]

    stranger = ollama.Client(host=ADDRESS)
    return [error(CLIENT, model="other"), error(CLIENT, model=MODEL, options={"mirostat": 1}), error(stranger, **COLD)]


tell()
