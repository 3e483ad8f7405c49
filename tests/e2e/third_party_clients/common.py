"""What the programs that use other authors' clients share with the tests: the lessons, and how they tell what they got.

A program runs in its client's own environment, which has neither Pegboard nor pytest; so this module needs nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

KEY, MODEL = "sk-user-key", "tiny"

THANKS, WELCOME = "Thank you.", "You are welcome."
BOTH, END = "What weather, what time?", "It is sunny, and noon."
CALLS: dict[str, dict[str, Any]] = {"get_weather": {"city": "Rome"}, "get_time": {"utc": True}}
RESULTS = {"get_weather": "sunny", "get_time": "noon"}
CLOCK, CLOCK_SAYS = "Tick, tock, tick, tock: 12?", "five past seven"
"""Asked for the time, it calls; told this time, it answers with a person."""
WHO, CALL_WHO = "Who is it, as JSON?", "Call Person, I beg you."
PARTS = "Part by part, please."
"""What Instructor calls a person that comes in parts is PartialPerson."""
PERSON: dict[str, Any] = {"name": "Ada", "age": 36}

TURN = "<|im_end|>\n<|im_start|>assistant\n"


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


LESSONS = {
    f"{THANKS}{TURN}": WELCOME,
    f"{BOTH}{TURN}": "\n".join(_call(*one) for one in CALLS.items()),
    f"<tool_response>\n{RESULTS['get_time']}\n</tool_response>{TURN}": END,
    f"{CLOCK}{TURN}": _call("get_time", CALLS["get_time"]),
    f"<tool_response>\n{CLOCK_SAYS}\n</tool_response>{TURN}": json.dumps(PERSON),
    f"{WHO}{TURN}": json.dumps(PERSON),
    f"{CALL_WHO}{TURN}": _call("Person", PERSON),
    f"{PARTS}{TURN}": _call("PartialPerson", PERSON),
}
"""What the model does of its own accord, by the end of the prompt. Each text ends with the end of a turn."""

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_time": {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    },
}

ADDRESS = os.environ.get("PEGBOARD_ADDRESS", "")
V1 = f"{ADDRESS}/v1"
TOO_LONG = "hello " * 2048

_asks: dict[str, Callable[[], Any]] = {}


def said(text: str) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def chat_tools() -> list[Any]:
    """The tools as chat completions take them."""
    return [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]


def ask(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register what a program asks its client for, under its name. What it returns has to be JSON."""
    _asks[function.__name__] = function
    return function


def tell() -> None:
    """Ask all of it, and print what came or what went wrong, as one line."""
    told = {}
    with asyncio.Runner() as runner:
        for name, function in _asks.items():
            try:
                value = function()
                told[name] = {"value": runner.run(_awaited(value)) if inspect.isawaitable(value) else value}
            except Exception:
                told[name] = {"error": traceback.format_exc()}
    print(json.dumps(told))  # noqa: T201


async def _awaited(value: Any) -> Any:
    return await value
