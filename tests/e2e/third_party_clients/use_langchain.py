"""LangChain's models of OpenAI's two APIs and of Anthropic's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"

from common import ADDRESS, BOTH, CALL_WHO, KEY, MODEL, RESULTS, THANKS, TOO_LONG, V1, WHO, ask, tell
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

CHAT: Any = {"model": MODEL, "base_url": V1, "api_key": KEY, "max_retries": 0, "temperature": 0}
CLAUDE: Any = {
    "model": MODEL,
    "base_url": ADDRESS,
    "api_key": KEY,
    "max_retries": 0,
    "max_tokens": 200,
    "temperature": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "chat": lambda: ChatOpenAI(**CHAT),
    "responses": lambda: ChatOpenAI(**CHAT, use_responses_api=True),
    "anthropic": lambda: ChatAnthropic(**CLAUDE),
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather."""
    return RESULTS["get_weather"]


@tool
def get_time(utc: bool) -> str:
    """The time."""
    return RESULTS["get_time"]


def invoke(model: Any) -> Any:
    answer = model.invoke(THANKS)
    assert answer.usage_metadata["output_tokens"] > 1
    return answer.text


def stream(model: Any) -> Any:
    chunks = list(model.stream(THANKS))
    assert sum(bool(one.text) for one in chunks) > 1
    return "".join(one.text for one in chunks)


def bind_tools(model: Any) -> Any:
    tools = {"get_weather": get_weather, "get_time": get_time}
    bound = model.bind_tools(list(tools.values()))
    first = bound.invoke(BOTH)
    whole = None
    for chunk in bound.stream(BOTH):
        whole = chunk if whole is None else whole + chunk
    assert [one["args"] for one in whole.tool_calls] == [one["args"] for one in first.tool_calls]
    results = [ToolMessage(tools[one["name"]].invoke(one["args"]), tool_call_id=one["id"]) for one in first.tool_calls]
    last = bound.invoke([HumanMessage(BOTH), first, *results])
    return [{one["name"]: one["args"] for one in first.tool_calls}, last.text]


def json_schema(model: Any) -> Any:
    return model.with_structured_output(Person, method="json_schema").invoke(WHO).model_dump()


def function_calling(model: Any) -> Any:
    return model.with_structured_output(Person, method="function_calling").invoke(CALL_WHO).model_dump()


def too_long(model: Any) -> Any:
    seen = []
    for call in (model.invoke, lambda text: list(model.stream(text))):
        try:
            call(TOO_LONG)
        except ContextOverflowError:
            seen.append("ContextOverflowError")
    return seen


def add(function: Any, name: str) -> None:
    def asked() -> Any:
        return function(MODELS[name]())

    asked.__name__ = f"{name}_{function.__name__}"
    ask(asked)


for one_model in MODELS:
    for one_function in (invoke, stream, bind_tools, json_schema, function_calling, too_long):
        add(one_function, one_model)


@ask
def text_completion() -> Any:
    prompt = f"<|im_start|>user\n{THANKS}<|im_end|>\n<|im_start|>assistant\n"
    return OpenAI(**CHAT, max_tokens=50).invoke(prompt)


tell()
