"""docs/openai.md lists fields: those of OpenAI's reference, of the servers of vLLM and SGLang, and our own. Each is
taken, has no effect, or is refused by name, as the page says.
"""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.plugins.api_openai.chat_body import ChatBody
from pegboard.plugins.api_openai.completions import CompletionBody
from pegboard.plugins.api_openai.embeddings import EmbeddingBody
from pegboard.plugins.api_openai.responses.body import ResponseBody
from pegboard.plugins.api_openai.scoring import RerankBody, ScoreBody
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai.asking import make_app
from tests.plugins.api_openai.reference_fields import OPENAI, SGLANG, VLLM
from tests.plugins.field_tables import (
    FUNCTION,
    PROCESSORS,
    SAMPLES,
    TEMPLATE,
    TOOLS,
    USER,
    Outcome,
    documented,
    treatment,
)

TABLES = documented("openai.md")
BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
}
LABELS = {"query": "a", "items": ["b"], "label_token_ids": [65]}
FLAT = {"tools": [{"type": "function", **FUNCTION}]}
ASSISTANT = {"messages": [USER, {"role": "assistant", "content": "So"}]}
BESIDE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions parallel_tool_calls": {"tools": TOOLS, "tool_choice": "required"},
    "/v1/chat/completions tool_choice": {"tools": TOOLS},
    "/v1/chat/completions continue_final_message": ASSISTANT,
    "/v1/chat/completions top_logprobs": {"logprobs": True},
    "/v1/chat/completions stream_reasoning": {"stream": True},
    "/v1/responses tool_choice": FLAT,
    "/v1/responses parallel_tool_calls": {**FLAT, "tool_choice": "required"},
    "/v1/score query": {"text_1": None, "text_2": None, "documents": ["b"]},
    "/v1/score documents": {"text_1": None, "text_2": None, "query": "a"},
    **{f"/v1/score {name}": LABELS for name in ("items", "item_first", "apply_softmax", "label_token_ids")},
    "* stream_options": {"stream": True},
    "* custom_params": {"custom_logit_processor": ""},
    "* stop_regex": {},
}
"""What else a body needs for a field to mean something."""
OWN: dict[str, Any] = {
    "/v1/chat/completions add_special_tokens": True,
    "/v1/chat/completions logprobs": True,
    "/v1/chat/completions messages": [{"role": "user", "content": "other"}],
    "/v1/chat/completions continue_final_message": True,
    "/v1/chat/completions stream_reasoning": False,
    "/v1/completions logprobs": 2,
    "/v1/completions prompt": "other",
    "/v1/rerank top_k": 1,
    "/v1/responses include": ["message.output_text.logprobs"],
    "/v1/responses input": "other",
    "/v1/responses instructions": "Be kind.",
    "/v1/responses metadata": {"a": "b"},
    "/v1/responses reasoning": {"effort": "high"},
    "/v1/responses response_format": {"type": "json_object"},
    "/v1/responses text": {"format": {"type": "json_object"}},
    "/v1/responses tools": FLAT["tools"],
    "/v1/embeddings input": "other",
    "/v1/score label_token_ids": [66],
    "/v1/score text_1": "c",
    "/v1/score text_2": ["c", "d"],
    "/v1/score temperature": 0,
    "* model": "fake-model",
}
"""Values of fields that mean something else here."""
UNSEEN = {
    "* model": "nowhere",
    "* thinking_token_budget": -1,
    "* session_params": {"id": 5},
    "/v1/responses previous_response_id": "resp_unknown",
    "/v1/responses store": 5,
}
"""Fields whose effect is seen by what is refused: another model, and so on."""


def parameters() -> list[tuple[str, str, str]]:
    return [(route, name, said) for route, fields in TABLES.items() for name, said in fields.items()]


def looked_up(table: dict[str, Any], route: str, name: str, default: Any) -> Any:
    return table.get(f"{route} {name}", table.get(f"* {name}", default))


def test_the_page_has_every_field() -> None:
    assert TABLES.keys() == BODIES.keys()
    for route, body in BODIES.items():
        known = {*body.model_fields, *body.refused}
        for reference in (OPENAI, VLLM, SGLANG):
            known |= set(reference.get(route, "").split())
        assert known == TABLES[route].keys(), route


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    client = FakeEngineClient(("((a", "b", "))c"), features=PROCESSORS, tokenizer=FakeTokenizer(template=TEMPLATE))
    return Outcome(client, make_app(client, **fake_parsers()))


@pytest.mark.parametrize(("route", "name", "said"), parameters())
def test_what_becomes_of_a_field(outcome: Outcome, route: str, name: str, said: str) -> None:
    base = {**NEEDED[route], **looked_up(BESIDE, route, name, {})}
    unseen = looked_up(UNSEEN, route, name, None)
    if unseen is not None and said == "taken":
        assert outcome(route, {**base, name: unseen})[1]["error"]["param"].startswith(name)
        return
    sample = looked_up(OWN, route, name, SAMPLES.get(name, True))
    assert treatment(outcome, route, base, name, sample) == said
