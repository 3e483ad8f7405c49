"""The tables of fields in docs/openai.md and docs/anthropic.md, and what a request does with a field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient

DOCS = Path(__file__).parents[2] / "docs"
TREATMENTS = ("taken", "without effect", "refused")
PROCESSORS = ("logits_processor.bad_words", "logits_processor.allowed_token_ids")

Treatments = dict[str, dict[str, str]]
"""By route, what becomes of each field."""

SCHEMA = {"type": "object", "properties": {}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "Hi"}

SAMPLES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "allowed_token_ids": [65],
    "apply_softmax": True,
    "bad_words": ["no"],
    "best_of": 3,
    "betas": ["x"],
    "cache_control": {"type": "ephemeral"},
    "cache_salt": "salt",
    "chat_template_kwargs": {"enable_thinking": False},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "custom_logit_processor": "bad_words",
    "custom_params": {"bad_words": {"words": ["no"]}},
    "dimensions": 2,
    "documents": ["other"],
    "ebnf": 'root ::= "a"',
    "echo": True,
    "encoding_format": "base64",
    "extra_key": "key",
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": SCHEMA,
    "guided_json_object": True,
    "guided_regex": "a",
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "item_first": True,
    "items": ["c"],
    "json_schema": SCHEMA,
    "label_token_ids": [65],
    "length_penalty": 0.5,
    "logit_bias": {"65": 1},
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "metadata": {"user_id": "x"},
    "min_p": 0.5,
    "min_tokens": 2,
    "mm_payload": "other",
    "modalities": ["audio"],
    "n": 2,
    "no_stop_trim": True,
    "normalize": False,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "parallel_tool_calls": False,
    "params": {"gate": {"a": 1}},
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt_logprobs": 1,
    "query": "q",
    "reasoning_effort": "high",
    "regex": "a",
    "repetition_penalty": 1.5,
    "response_format": FORMAT,
    "return_documents": False,
    "return_hidden_states": True,
    "return_token_ids": True,
    "rid": "other",
    "seed": 7,
    "separate_reasoning": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["x"],
    "stop_regex": "x",
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["a", "b"]},
    "system": "Be kind.",
    "temperature": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "tool_choice": "none",
    "tools": TOOLS,
    "top_k": 5,
    "top_logprobs": 2,
    "top_n": 1,
    "top_p": 0.5,
    "truncation": "auto",
    "suffix": "x",
    "use_activation": False,
    "user": "me",
    "verbosity": "low",
}
"""A value of each field that asks for something; `true` where there is none."""

TEMPLATE = (
    "{{ enable_thinking }}{{ reasoning_effort }}{{ verbosity }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that reads what others may not."""


def documented(page: str) -> Treatments:
    """What a page says, all its tables with these columns together. Raises AssertionError for a field that stands
    twice.
    """
    found: Treatments = {}
    rows = re.findall(r"^\| `POST (\S+)` \| (.*) \| (.*) \| (.*) \|$", (DOCS / page).read_text(), re.MULTILINE)
    for route, *cells in rows:
        fields = found.setdefault(route, {})
        for treatment, cell in zip(TREATMENTS, cells, strict=True):
            for name in re.findall(r"`(\w+)`", cell):
                assert name not in fields, f"{page}: {name} of {route} stands twice"
                fields[name] = treatment
    return found


class Outcome:
    """What comes of bodies: status, answer, and what the engine was asked; each body is asked once."""

    def __init__(self, client: FakeEngineClient, app: Any) -> None:
        self._client, self._app = client, app
        self._known: dict[str, tuple[int, Any, str]] = {}

    def __call__(self, route: str, body: Mapping[str, Any]) -> tuple[int, Any, str]:
        key = f"{route} {json.dumps(body, sort_keys=True)}"
        if key not in self._known:
            self._client.requests.clear()
            self._client.embedded.clear()
            done = asyncio.run(call(self._app, "POST", route, dict(body)))
            asked = _without_chance(repr([*self._client.requests, *self._client.embedded]))
            answer = _without_chance(done.body.decode()) if done.status == 200 else json.loads(done.body)
            self._known[key] = done.status, answer, asked  # type: ignore[assignment]
        return self._known[key]


def treatment(outcome: Outcome, route: str, base: Mapping[str, Any], name: str, sample: Any) -> str:
    """What becomes of a field, as far as the engine's requests and the answer tell."""
    without, with_it = outcome(route, base), outcome(route, {**base, name: sample})
    if with_it == without:
        return "without effect"
    status, answer, _ = with_it
    if status == 200:
        return "taken"
    error = answer["error"]
    details = error.get("details") or error
    code = details.get("code") or details.get("error_code")
    assert details["param"] == name, answer
    return "refused" if code in ("unsupported", "thread_unsupported_request") else f"{status}: {answer}"


def _without_chance(text: str) -> str:
    """Without ids and times."""
    return re.sub(r'[0-9a-f]{32}|(?<="created":)\d+|(?<=_at":)[0-9.]+', "", text)
