"""docs/anthropic.md lists fields: those of Anthropic's reference, of the servers of vLLM and SGLang, and our own. Each
is taken, has no effect, or is refused by name, as the page says.
"""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.plugins.api_anthropic.requests import MessagesBody, PromptBody
from tests.plugins.api_anthropic.test_router import COUNT, PATH, make_app
from tests.plugins.field_tables import PROCESSORS, SAMPLES, SCHEMA, TEMPLATE, USER, Outcome, documented, treatment

TABLES = documented("anthropic.md")
BODIES: dict[str, Any] = {PATH: MessagesBody, COUNT: PromptBody}
REFERENCE = {
    PATH: """
        betas billing_policy cache_control compaction container context_management diagnostics fallback_credit_token
        fallbacks inference_geo max_tokens mcp_servers messages metadata model output_config output_format service_tier
        speed stop_sequences stream system temperature thinking thread tool_choice tools top_k top_p user_profile_id
        workspace_id
    """,
    COUNT: """
        betas billing_policy cache_control compaction context_management mcp_servers messages model output_config
        output_format speed system thinking tool_choice tools user_profile_id workspace_id
    """,
}
"""anthropic-python 2.12.0, `types/**/message_create_params.py` and `message_count_tokens_params.py`, and what the API
had before.
"""
OTHERS = {
    PATH: """
        bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs disagg_prefill_dp_rank
        ec_transfer_params kv_transfer_params mm_payload return_mm_kwargs routed_dp_rank vllm_xargs watermarking
    """,
    COUNT: "chat_template_kwargs",
}
"""Of vLLM 0.33.0 and SGLang 0.5.23, `anthropic/protocol.py`."""

TOOLS = [{"name": "f", "input_schema": SCHEMA}]
OWN: dict[str, Any] = {
    "container": "x",
    "max_tokens": 20,
    "mcp_servers": [{"name": "x"}],
    "messages": [USER, {"role": "assistant", "content": "So"}],
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "tool_choice": {"type": "none"},
    "tools": TOOLS,
}
UNSEEN: dict[str, dict[str, Any]] = {
    PATH: {"model": "nowhere"},
    COUNT: {"model": "nowhere", "output_config": {"effort": 5}, "tools": 5, "tool_choice": 5},
}
"""Fields whose effect is seen by what is refused."""


def parameters() -> list[tuple[str, str, str]]:
    return [(route, name, said) for route, fields in TABLES.items() for name, said in fields.items()]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    client = FakeEngineClient(("((a", "b", "))c"), features=PROCESSORS, tokenizer=FakeTokenizer(template=TEMPLATE))
    return Outcome(client, make_app(client))


def test_the_page_has_every_field() -> None:
    assert TABLES.keys() == BODIES.keys()
    for route, body in BODIES.items():
        known = {*body.model_fields, *body.refused, *REFERENCE[route].split(), *OTHERS[route].split()}
        assert known == TABLES[route].keys(), route


@pytest.mark.parametrize(("route", "name", "said"), parameters())
def test_what_becomes_of_a_field(outcome: Outcome, route: str, name: str, said: str) -> None:
    base: dict[str, Any] = {"model": "fake-model", "messages": [USER]}
    if route == PATH:
        base["max_tokens"] = 9
    if name == "tool_choice":
        base["tools"] = TOOLS
    if said == "taken" and name in UNSEEN[route]:
        error = outcome(route, {**base, name: UNSEEN[route][name]})[1]["error"]
        assert error["details"]["param"].startswith(name)
        return
    assert treatment(outcome, route, base, name, OWN.get(name, SAMPLES.get(name, True))) == said
