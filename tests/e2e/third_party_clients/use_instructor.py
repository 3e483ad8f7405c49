"""Instructor, in the modes that differ in what a server has to do."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from common import ADDRESS, CALL_WHO, KEY, MODEL, PARTS, V1, WHO, ask, said, tell
from pydantic import BaseModel

Mode = instructor.Mode


class Person(BaseModel):
    name: str
    age: int


def chat(mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode)


def create(client: Any, question: str, **more: Any) -> Any:
    options = {"model": MODEL, "response_model": Person, "messages": said(question), "max_retries": 0}
    return client.chat.completions.create(**options, **more).model_dump()


@ask
def tools() -> Any:
    return create(chat(Mode.TOOLS), CALL_WHO, temperature=0)


@ask
def tools_strict() -> Any:
    return create(chat(Mode.TOOLS_STRICT), CALL_WHO, temperature=0)


@ask
def json_schema() -> Any:
    return create(chat(Mode.JSON_SCHEMA), WHO, temperature=0)


@ask
def responses_tools() -> Any:
    return create(chat(Mode.RESPONSES_TOOLS), CALL_WHO, temperature=0)


@ask
def partial() -> Any:
    stream = chat(Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, response_model=Person, messages=said(PARTS), temperature=0
    )
    states = [one.model_dump() for one in stream]
    assert len(states) > 2
    return states[-1]


@ask
def anthropic_tools() -> Any:
    client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
    claude = instructor.from_anthropic(client, mode=Mode.ANTHROPIC_TOOLS)
    return create(claude, CALL_WHO, max_tokens=200, extra_body={"temperature": 0})


tell()
