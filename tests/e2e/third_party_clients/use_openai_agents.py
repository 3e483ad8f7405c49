"""OpenAI's Agents SDK: its loop with tools, a required call, typed output and handoffs, whole and streamed."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from common import BOTH, CLOCK, CLOCK_SAYS, KEY, MODEL, RESULTS, THANKS, V1, WHO, ask, tell
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
MODELS: Any = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
called: list[Any] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    called.append(city)
    return RESULTS["get_weather"]


@function_tool
def get_time(utc: bool) -> str:
    called.append(utc)
    return RESULTS["get_time"]


@function_tool(name_override="get_time")
def get_clock(utc: bool) -> str:
    called.append(utc)
    return CLOCK_SAYS


def agent(api: str, tool_choice: Any = None, **more: Any) -> Agent[Any]:
    called.clear()
    client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    settings = ModelSettings(temperature=0, tool_choice=tool_choice)
    return Agent(name="one", model=MODELS[api](model=MODEL, openai_client=client), model_settings=settings, **more)


def typed(api: str) -> Agent[Any]:
    return agent(api, "required", tools=[get_clock], output_type=Person)


async def loop(api: str) -> Any:
    result = await Runner.run(agent(api, tools=[get_weather, get_time]), BOTH, max_turns=3)
    return [result.final_output, list(called)]


async def required(api: str) -> Any:
    result = await Runner.run(typed(api), CLOCK, max_turns=3)
    return [result.final_output.model_dump(), list(called)]


async def streamed(api: str) -> Any:
    result = Runner.run_streamed(typed(api), CLOCK, max_turns=3)
    seen = [one async for one in result.stream_events()]
    items = [one.name for one in seen if one.type == "run_item_stream_event"]
    text = [one.data for one in seen if one.type == "raw_response_event"]
    parts = [one.delta for one in text if one.type == "response.output_text.delta"]
    return [
        result.final_output.model_dump(),
        list(called),
        items,
        Person.model_validate_json("".join(parts)).model_dump(),
    ]


async def typed_only(api: str) -> Any:
    return (await Runner.run(agent(api, output_type=Person), WHO)).final_output.model_dump()


async def session(api: str) -> Any:
    one, kept = agent(api), SQLiteSession("kept")
    await Runner.run(one, THANKS, session=kept)
    result = await Runner.run(one, THANKS, session=kept)
    return [result.final_output, len(await kept.get_items())]


def add(function: Any, api: str) -> None:
    def asked() -> Any:
        return function(api)

    asked.__name__ = f"{api}_{function.__name__}"
    ask(asked)


for one_api in MODELS:
    for one_function in (loop, required, streamed, typed_only, session):
        add(one_function, one_api)
tell()
