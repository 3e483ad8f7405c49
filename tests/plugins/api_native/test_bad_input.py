"""Every field out of range, of a wrong type or in conflict: 400 with the field's name, and nothing reaches the engine.

Huge n and logprobs (CVE-2026-34756, CVE-2025-48956) and tensors (CVE-2025-62164) have tests of their own besides.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pegboard.plugins.api_native.unsupported import ENCODE, GENERATE, HARMLESS
from pegboard.toolkit.http import refusals
from pegboard.toolkit.text.near_names import did_you_mean
from tests.plugins.api_native.asking import asked

HUGE = 10**18
SCHEMA = '{"type": "object"}'

BODIES: list[tuple[dict[str, Any], str]] = [
    ({"text": None}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text"),
    ({"text": 5}, "text"),
    ({"text": "a" * (4096 * 256 + 1)}, "text"),
    ({"text": "a" * 4096}, "text"),
    ({"text": ["a"] * 1025}, "text"),
    ({"input_ids": [1]}, "text"),
    ({"text": None, "input_ids": []}, "input_ids"),
    ({"text": None, "input_ids": [[1], []]}, "input_ids"),
    ({"text": None, "input_ids": "abc"}, "input_ids"),
    ({"text": None, "input_ids": [1, "a"]}, "input_ids"),
    ({"text": None, "input_ids": [1.5]}, "input_ids"),
    ({"text": None, "input_ids": [True]}, "input_ids"),
    ({"text": None, "input_ids": [-1]}, "input_ids"),
    ({"text": None, "input_ids": [HUGE]}, "input_ids"),
    ({"text": None, "input_ids": [[1], [HUGE]]}, "input_ids"),
    ({"text": None, "input_ids": [1] * 4096}, "input_ids"),
    ({"stream": "yes"}, "stream"),
    ({"rid": 7}, "rid"),
    ({"rid": "r" * 257}, "rid"),
    ({"rid": ["one", "two"]}, None),  # type: ignore[list-item]
    ({"text": ["a", "b"], "rid": ["one"]}, "rid"),
    ({"priority": 2**31}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"extra_key": []}, "extra_key"),
    ({"params": []}, "params"),
    ({"params": {"x": "y" * 70_000}}, "params"),
    # log-probabilities
    ({"return_logprob": "yes"}, "return_logprob"),
    ({"return_logprob": [True, False]}, None),  # type: ignore[list-item]
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": HUGE}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"top_logprobs_num": -1}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": 1.5}, "top_logprobs_num"),
    ({"return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
    ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"return_logprob": True, "logprob_start_len": "0"}, "logprob_start_len"),
    ({"logprob_start_len": 0}, "logprob_start_len"),
    ({"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": [HUGE]}, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": [1] * 4097}, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": ["a"]}, "token_ids_logprob"),
    ({"return_text_in_logprobs": 1}, "return_text_in_logprobs"),
    ({"return_hidden_states": "all"}, "return_hidden_states"),
    # sessions
    ({"session_params": "s"}, "session_params"),
    ({"session_params": {"id": 5}}, "session_params.id"),
    ({"session_params": {"rid": "x"}}, "session_params.id"),
    ({"session_params": {"id": "s", "rid": 1}}, "session_params.rid"),
    ({"session_params": {"id": "s", "offset": 1.5}}, "session_params.offset"),
    ({"session_params": {"id": "s", "replace": "yes"}}, "session_params.replace"),
    ({"session_params": {"id": "s", "drop_previous_output": 1}}, "session_params.drop_previous_output"),
    ({"session_params": {"id": "s"}, "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"session_params": {"id": "s"}, "text": ["a", "b"]}, "session_params"),
    # what this server does not do
    ({"input_embeds": [[0.0, 1.0]]}, "input_embeds"),
    ({"input_embeds": {"data": "gASV", "dtype": "float32"}}, "input_embeds"),
    ({"input_embeds": "gASVAAAA"}, "input_embeds"),
    ({"image_data": "http://example.com/a.png"}, "image_data"),
    ({"image_data": [None, "a"]}, "image_data"),
    ({"video_data": ["v"]}, "video_data"),
    ({"audio_data": "a"}, "audio_data"),
    ({"lora_path": "x"}, "lora_path"),
    ({"lora_path": [None, "x"]}, "lora_path"),
    ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    ({"bootstrap_port": 8998}, "bootstrap_port"),
    ({"bootstrap_room": 5}, "bootstrap_room"),
    ({"routed_dp_rank": 1}, "routed_dp_rank"),
    ({"routed_dp_rank": "0"}, "routed_dp_rank"),
    ({"custom_logit_processor": 5}, "custom_logit_processor"),
    ({"custom_logit_processor": "gASVcode"}, "custom_logit_processor"),
    ({"custom_logit_processor": {"callable": "gASV"}}, "custom_logit_processor"),
    ({"custom_logit_processor": "dry", "sampling_params": {"custom_logit_processor": "dry"}}, "custom_logit_processor"),
    (
        {"custom_logit_processor": ["dry"], "sampling_params": {"custom_params": {"wet": {}}}},
        "sampling_params.custom_params",
    ),
    ({"sampling_params": 3}, "sampling_params"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
]

SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": "many"}, "max_new_tokens"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ({"min_new_tokens": -1}, "min_new_tokens"),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": HUGE}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": ["x" * 1025]}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 4097}, "stop_token_ids"),
    ({"stop_regex": "("}, "stop_regex"),
    ({"stop_regex": [5]}, "stop_regex"),
    ({"stop_regex": ["x"] * 17}, "stop_regex"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "up"}}, "logit_bias.1"),
    ({"logit_bias": {str(HUGE): 1}}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "one"}, "seed"),
    ({"sampling_seed": 1.5}, "sampling_seed"),
    ({"sampling_seed": 1, "seed": 2}, "sampling_seed"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1025}, "n"),
    ({"n": HUGE}, "n"),
    ({"n": "2"}, "n"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"no_stop_trim": 1}, "no_stop_trim"),
    ({"skip_special_tokens": "x"}, "skip_special_tokens"),
    ({"custom_params": 5}, "custom_params"),
    ({"custom_params": {"wet": {}}}, "custom_logit_processor"),
    ({"custom_params": {"dry": 5}}, "custom_params.dry"),
    ({"custom_params": {"dry": {"x": "y" * 70_000}}}, "custom_params"),
    ({"json_schema": SCHEMA, "regex": "a"}, "regex"),
    ({"ebnf": 'root ::= "a"', "regex": "a"}, "ebnf"),
    ({"regex": "a", "structural_tag": {}}, "structural_tag"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": 5}, "json_schema"),
    ({"json_schema": ""}, "json_schema"),
    ({"regex": ""}, "regex"),
    ({"regex": 5}, "regex"),
    ({"ebnf": ["a"]}, "ebnf"),
    ({"structural_tag": "{}"}, "structural_tag.structures"),
]


def short(value: object) -> str:
    return str(value)[:60]


@pytest.mark.parametrize(("body", "field"), BODIES, ids=short)
def test_bad_fields_are_named(body: dict[str, Any], field: str | None) -> None:
    done, client = asked("/generate", {"text": "abc", **body})
    assert done.status == 400, done.body
    error = done.json()["error"]
    if field is not None:
        assert error["param"] == field
    assert error["message"]
    assert len(error["message"]) < 1000
    assert client.requests == []


@pytest.mark.parametrize(("sampling", "field"), SAMPLING, ids=short)
def test_bad_sampling_fields_are_named(sampling: dict[str, Any], field: str) -> None:
    done, client = asked("/generate", {"text": "abc", "sampling_params": sampling})
    assert done.status == 400, done.body
    assert done.json()["error"]["param"] == f"sampling_params.{field}"
    assert client.requests == []


@pytest.mark.parametrize("n", [1025, 2**31, 2**63, HUGE**3])
@pytest.mark.parametrize("prompts", [1, 1000])
def test_34756_a_huge_n_costs_nothing(n: int, prompts: int) -> None:
    body = {"text": ["a"] * prompts, "sampling_params": [{}] * (prompts - 1) + [{"n": n}]}
    done, client = asked("/generate", body)
    assert (done.status, done.json()["error"]["param"]) == (400, "sampling_params.n")
    assert client.requests == []


@pytest.mark.parametrize("top", [129, 2**31, 2**63, HUGE**3])
@pytest.mark.parametrize("start", [-1, 0])
def test_34756_huge_logprobs_cost_nothing(top: int, start: int) -> None:
    body = {"text": "abc", "return_logprob": True, "top_logprobs_num": top, "logprob_start_len": start}
    done, client = asked("/generate", body)
    assert (done.status, done.json()["error"]["param"]) == (400, "top_logprobs_num")
    assert client.requests == []


@pytest.mark.parametrize("path", ["/generate", "/encode"])
@pytest.mark.parametrize(
    "embeds",
    [
        [[0.5] * 8],
        [0.5],
        "gASVIAAAAAAAAACMBXRvcmNo",
        {"shape": [1, 8], "layout": "sparse_coo", "data": "AAAA"},
        7,
        True,
    ],
    ids=short,
)
def test_62164_tensors_are_refused_whatever_they_look_like(path: str, embeds: object) -> None:
    done, client = asked(path, {"input_embeds": embeds})
    assert (done.status, done.json()["error"]["param"]) == (400, "input_embeds")
    assert client.requests == []


def test_one_bad_request_of_a_batch_is_refused_with_all() -> None:
    body = {"text": ["a", "b"], "sampling_params": [{"temperature": 0.5}, {"temperature": -1}]}
    done, client = asked("/generate", body)
    assert (done.status, done.json()["error"]["param"]) == (400, "sampling_params.temperature")
    assert client.finished == []


@pytest.mark.parametrize("sampling", [{"n": 600}, {"n": 1024}])
def test_prompts_times_n_are_bounded(sampling: dict[str, Any]) -> None:
    done, client = asked("/generate", {"text": ["a", "b"], "sampling_params": sampling})
    assert (done.status, done.json()["error"]["param"]) == (400, "text")
    assert client.requests == []


def test_null_and_nothing_stand_for_the_default() -> None:
    nothing = dict.fromkeys(("image_data", "lora_path", "bootstrap_room", "session_params", "custom_logit_processor"))
    body = {"text": ["a", "b"], **nothing, "video_data": [None, None], "audio_data": "", "routed_dp_rank": 0}
    done, client = asked("/generate", {**body, "sampling_params": {"stop": None, "regex": None}, "of_the_future": {}})
    assert done.status == 200, done.body
    assert len(client.requests) == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a"] * 1025}, "text"),
        ({"input_ids": [HUGE]}, "input_ids"),
        ({"input_ids": [1] * 5000}, "input_ids"),
        ({"text": ["a", "b"], "rid": ["one"]}, "rid"),
        ({"text": "a", "dimensions": 0}, "dimensions"),
        ({"text": "a", "dimensions": "all"}, "dimensions"),
        ({"text": "a", "normalize": "yes"}, "normalize"),
        ({"text": "a", "input_embeds": [[1.0]]}, "input_embeds"),
        ({"text": "a", "is_cross_encoder_request": True}, "is_cross_encoder_request"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
    ids=short,
)
def test_bad_prompts_to_encode_are_named(body: dict[str, Any], field: str) -> None:
    done, client = asked("/encode", body)
    assert (done.status, done.json()["error"]["param"]) == (400, field), done.body
    assert client.embedded == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/open_session", {"capacity_of_str_len": -1}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": "10"}, "capacity_of_str_len"),
        ("/open_session", {"session_id": 5}, "session_id"),
        ("/open_session", {"session_id": "s" * 257}, "session_id"),
        ("/open_session", {"timeout": 0}, "timeout"),
        ("/open_session", {"timeout": "1h"}, "timeout"),
        ("/close_session", {}, "session_id"),
        ("/close_session", {"session_id": 5}, "session_id"),
        ("/parse_function_call", {"tools": []}, "text"),
        ("/parse_function_call", {"text": "a"}, "tools"),
        ("/parse_function_call", {"text": "a", "tools": []}, "tools"),
        ("/parse_function_call", {"text": "a", "tools": "x"}, "tools"),
        ("/separate_reasoning", {}, "text"),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "other"}, "reasoning_parser"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": ["a"]}, "rid"),
        ("/pause_generation", {"mode": "sleep"}, "mode"),
        ("/configure_logging", {"log_level": "loud"}, "log_level"),
        ("/configure_logging", {"log_requests": "yes"}, "log_requests"),
        ("/configure_logging", {"dump_requests_folder": "/etc"}, "dump_requests_folder"),
        ("/configure_logging", {"log_requests_level": 3}, "log_requests_level"),
    ],
    ids=short,
)
def test_bad_fields_of_other_routes_are_named(path: str, body: dict[str, Any], field: str) -> None:
    done, client = asked(path, body)
    assert (done.status, done.json()["error"]["param"]) == (400, field), done.body
    assert client.controls == []


def test_nothing_is_said_where_a_body_is_needed() -> None:
    for path in ("/generate", "/encode", "/close_session", "/configure_logging", "/abort_request"):
        assert asked(path)[0].status == 400


# ---- fields that are not known ---------------------------------------------------------------------------------------


def refused(path: str, body: dict[str, Any]) -> dict[str, Any]:
    done, client = asked(path, {"text": "Hi", **body})
    assert (done.status, client.requests) == (400, []), done.body
    error: dict[str, Any] = done.json()["error"]
    return error


def taken(path: str, body: dict[str, Any]) -> None:
    done, _ = asked(path, {"text": "Hi", **body})
    assert done.status == 200, done.body


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"sampling_params": {"max_new_token": 3}}, "sampling_params.max_new_token", "'max_new_tokens'"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_pp": 1}]}, "sampling_params.top_pp", "'top_p'"),
        ({"sampling_params": {"mirostat": 2}}, "sampling_params.mirostat", ""),
        ({"sampling_param": {"top_p": 0.5}}, "sampling_param", "'sampling_params'"),
        ({"return_logprobs": True}, "return_logprobs", "'return_logprob'"),
    ],
)
def test_a_misspelt_field_is_refused(body: dict[str, Any], param: str, hint: str) -> None:
    error = refused("/generate", body)
    assert (error["param"], error["code"]) == (param, "unknown_field")
    assert error["message"].startswith(f"{param} is not a field")
    assert ("did you mean" in error["message"]) == bool(hint)
    assert hint in error["message"]


@pytest.mark.parametrize("path", ["/generate", "/encode"])
def test_a_field_of_sglang_that_would_change_the_answer_is_refused(path: str) -> None:
    table = GENERATE if path == "/generate" else ENCODE
    for name, refusal in table.items():
        error = refused(path, {name: 1})
        assert error["param"] == name
        assert error["message"] == f"{name} is not supported by this server{refusal.instead}"
        taken(path, {name: None})
    taken(path, {"data_parallel_rank": 0})


def test_names_of_sglangs_own_class_are_refused_where_they_ask_for_something() -> None:
    error = refused("/generate", {"sampling_params": {"stop_strs": ["x"]}})
    assert error["param"] == "sampling_params.stop_strs"
    assert error["message"] == "sampling_params.stop_strs is not supported by this server; use stop"


@pytest.mark.parametrize("path", ["/generate", "/encode"])
def test_other_fields_are_ignored_and_logged(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "_reported", set())
    with caplog.at_level(logging.INFO, logger=refusals.__name__):
        taken(path, dict.fromkeys(HARMLESS, "x"))
        taken(path, {"sampling_params": {"stream_interval": 4, "mirostat": None}, "mirostat": None})
        # As SGLang's own class of them has it, with nothing asked for.
        dumped: dict[str, Any] = {
            "stop_strs": [],
            "stop_regex_strs": None,
            "stop_str_max_len": 0,
            "is_normalized": False,
        }
        taken(path, {"sampling_params": dumped})
        assert not caplog.records
        for _ in range(2):
            taken(path, {"mirostat": 2})
    assert [record.args for record in caplog.records] == [("mirostat",)]


def test_of_very_many_unknown_fields_few_are_compared_with_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def noted(name: str, *args: Any, **more: Any) -> Any:
        asked.append(name)
        return did_you_mean(name, *args, **more)

    monkeypatch.setattr(f"{refusals.__name__}.did_you_mean", noted)
    taken("/generate", {f"zzzz{number}": 1 for number in range(2000)})
    assert len(asked) == 16
    taken("/generate", {f"zzzz{number}": 1 for number in range(5)})
    assert len(asked) == 16, "the same names are looked up again"


def test_a_long_name_is_not_shown_as_a_whole() -> None:
    assert len(refused("/generate", {"sampling_params": {"x" * 100_000: 1}})["message"]) < 200
