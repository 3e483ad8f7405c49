"""LiteLLM, with each of the providers under which a server like this one is reached."""

from __future__ import annotations

import json
import os
from typing import Any

from common import ADDRESS, BOTH, CALL_WHO, KEY, MODEL, RESULTS, THANKS, TOO_LONG, V1, WHO, ask, chat_tools, said, tell

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel

litellm.telemetry = False
PROVIDERS = {"openai": V1, "hosted_vllm": V1, "anthropic": ADDRESS}


class Person(BaseModel):
    name: str
    age: int


def complete(provider: str, messages: list[Any], **more: Any) -> Any:
    options = {"api_base": PROVIDERS[provider], "api_key": KEY, "num_retries": 0, "temperature": 0, "max_tokens": 200}
    return litellm.completion(f"{provider}/{MODEL}", messages, **(options | more))


@ask
def completion() -> Any:
    return [complete(one, said(THANKS)).choices[0].message.content for one in PROVIDERS]


@ask
def streamed() -> Any:
    texts = []
    for provider in PROVIDERS:
        chunks = [one.choices[0] for one in complete(provider, said(THANKS), stream=True)]
        texts.append("".join(one.delta.content or "" for one in chunks))
        assert sum(bool(one.delta.content) for one in chunks) > 1
        assert chunks[-1].finish_reason == "stop"
    return texts


@ask
def tool_loop() -> Any:
    ends = []
    for provider in PROVIDERS:
        message = complete(provider, said(BOTH), tools=chat_tools()).choices[0].message
        calls = {one.function.name: json.loads(one.function.arguments) for one in message.tool_calls}
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": RESULTS[one.function.name]}
            for one in message.tool_calls
        ]
        last = complete(provider, [*said(BOTH), message, *results], tools=chat_tools())
        ends.append([calls, last.choices[0].message.content])
    return ends


@ask
def streamed_calls() -> Any:
    found = []
    for provider in PROVIDERS:
        chunks = list(complete(provider, said(BOTH), tools=chat_tools(), stream=True))
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        found.append({one.function.name: json.loads(one.function.arguments) for one in message.tool_calls})
    return found


@ask
def forced_call() -> Any:
    person = {"type": "function", "function": {"name": "Person", "parameters": Person.model_json_schema()}}
    choice = {"type": "function", "function": {"name": "Person"}}
    answers = [complete(one, said(CALL_WHO), tools=[person], tool_choice=choice) for one in PROVIDERS]
    return [json.loads(one.choices[0].message.tool_calls[0].function.arguments) for one in answers]


@ask
def typed() -> Any:
    providers = ["openai", "hosted_vllm"]
    answers = [complete(one, said(WHO), response_format=Person) for one in providers]
    return [json.loads(one.choices[0].message.content) for one in answers]


@ask
def responses() -> Any:
    return litellm.responses(input=THANKS, model=f"openai/{MODEL}", api_base=V1, api_key=KEY).output[-1].content[0].text


@ask
def too_long() -> Any:
    names = []
    for provider in PROVIDERS:
        try:
            complete(provider, said(TOO_LONG))
        except litellm.ContextWindowExceededError as error:
            names.append(type(error).__name__)
    return names


@ask
def wrong_key() -> Any:
    names = []
    for provider in PROVIDERS:
        try:
            complete(provider, said(THANKS), api_key="sk-wrong")
        except Exception as error:
            names.append(type(error).__name__)
    return names


tell()
