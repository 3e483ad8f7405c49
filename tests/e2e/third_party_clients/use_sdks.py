"""OpenAI's and Anthropic's newest clients; the tests of the versions in the lock ask for much more."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from anthropic import beta_tool
from common import ADDRESS, BOTH, CALL_WHO, CALLS, CLOCK, KEY, MODEL, RESULTS, SCHEMAS, V1, WHO, ask, said, tell
from common import chat_tools as tools
from pydantic import BaseModel

COLD: Any = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
CHAT = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
CLAUDE = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)


class Person(BaseModel):
    name: str
    age: int


@ask
def chat_parsed() -> Any:
    answer = CHAT.chat.completions.parse(model=MODEL, messages=said(WHO), response_format=Person, temperature=0)
    return answer.choices[0].message.parsed.model_dump()


@ask
def chat_streamed_calls() -> Any:
    with CHAT.chat.completions.stream(model=MODEL, messages=said(BOTH), tools=tools(), temperature=0) as stream:
        done = [one for one in stream if one.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [one.arguments for one in done] == [one.function.arguments for one in calls]
    return {one.function.name: json.loads(one.function.arguments) for one in calls}


@ask
def responses_parsed() -> Any:
    return CHAT.responses.parse(model=MODEL, input=WHO, text_format=Person, temperature=0).output_parsed.model_dump()


@ask
def responses_loop() -> Any:
    options: Any = {"model": MODEL, "temperature": 0}
    options["tools"] = [
        {"type": "function", "name": name, "parameters": one, "strict": True} for name, one in SCHEMAS.items()
    ]
    with CHAT.responses.stream(**options, input=BOTH) as stream:
        stream.until_done()
        first = stream.get_final_response()
    calls = [one for one in first.output if one.type == "function_call"]
    assert {one.name: json.loads(one.arguments) for one in calls} == CALLS
    results: Any = [
        {"type": "function_call_output", "call_id": one.call_id, "output": RESULTS[one.name]} for one in calls
    ]
    return CHAT.responses.create(**options, input=results, previous_response_id=first.id).output_text


@ask
def messages_parsed() -> Any:
    answer = CLAUDE.messages.parse(**COLD, messages=said(WHO), output_format=Person)
    return answer.parsed_output.model_dump()


@ask
def messages_forced_call() -> Any:
    person: Any = {"name": "Person", "input_schema": Person.model_json_schema()}
    choice: Any = {"type": "tool", "name": "Person"}
    answer = CLAUDE.messages.create(**COLD, messages=said(CALL_WHO), tools=[person], tool_choice=choice)
    return [(one.type, one.name, one.input) for one in answer.content]


@ask
def messages_tool_runner() -> Any:
    @beta_tool
    def get_time(utc: bool) -> str:
        """The time.

        Args:
            utc: Whether there.
        """
        return RESULTS["get_time"]

    last = CLAUDE.beta.messages.tool_runner(**COLD, tools=[get_time], messages=said(CLOCK)).until_done()
    return "".join(one.text for one in last.content if one.type == "text")


tell()
