"""Sampling fields that make no sense: 400 with the field's name, in every API, before the engine hears of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.frontend.intake import Intake
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import GenerateRequest, OutputStream
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.http.app import build_app
from tests.features import FEATURES as STAGES

FEATURES = ("logits_processor.dry", "grammar.json_schema", "grammar.regex", "grammar.ebnf", "grammar.json")


class Strict(FakeEngineClient):
    """Looks at requests as the engine does, and answers those that pass."""

    async def submit(self, request: GenerateRequest) -> OutputStream:
        info = dataclasses.replace(self.info, vocab_size=1000, features=FEATURES)
        Intake(info, self.tokenizer, STAGES).prepare(request)
        return await super().submit(request)


def send_all(provider: str, path: str, bodies: Sequence[str]) -> list[tuple[Exchange, int]]:
    """The answer to each body, and how many requests have reached the engine by then."""

    async def scene() -> list[tuple[Exchange, int]]:
        client = Strict()
        record = Registry.discover().get("api", provider)
        assert record is not None
        router = record.load()(record.options_model()(), ApiContext(client=client, max_body_bytes=10**7))
        app = build_app([(provider, router)], max_body_bytes=10**7)
        return [(await call(app, "POST", path, body.encode()), len(client.requests)) for body in bodies]

    return asyncio.run(scene())


def native(fields: str) -> tuple[str, str, str]:
    return "native", "/generate", f'{{"text": "Hi", "sampling_params": {{{fields}}}}}'


def chat(fields: str) -> tuple[str, str, str]:
    fields = fields.replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
    messages = '"messages": [{"role": "user", "content": "Hi"}]'
    return "openai", "/v1/chat/completions", f'{{"model": "fake-model", {messages}, {fields}}}'


def completions(fields: str) -> tuple[str, str, str]:
    fields = fields.replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
    return "openai", "/v1/completions", f'{{"model": "fake-model", "prompt": "Hi", {fields}}}'


APIS = pytest.mark.parametrize("api", [native, chat, completions])


def values(field: str, *wrong: Any) -> list[tuple[str, str]]:
    return [(field, one if isinstance(one, Raw) else json.dumps(one)) for one in wrong]


class Raw(str):
    """JSON as it stands: what json.dumps would not write."""


NOT_FINITE = (Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"))
NO_NUMBERS = ("1", True, [1], {"a": 1})
NO_INTEGERS = (*NO_NUMBERS, 1.5, Raw("NaN"), 10**30)

WRONG = [
    *values("temperature", -0.1, -1e-30, 100.1, *NOT_FINITE, *NO_NUMBERS),
    *values("top_p", -0.5, 1.001, 1e-50, *NOT_FINITE, *NO_NUMBERS),
    *values("min_p", -0.001, 1.001, *NOT_FINITE, *NO_NUMBERS),
    *values("top_k", -2, 2**31, 2**70, *NO_INTEGERS),
    *values("frequency_penalty", -2.01, 2.01, *NOT_FINITE, *NO_NUMBERS),
    *values("presence_penalty", -2.01, 2.01, *NOT_FINITE, *NO_NUMBERS),
    *values("repetition_penalty", 0, -1, 2.01, 1e-50, *NOT_FINITE, *NO_NUMBERS),
    *values("max_new_tokens", -1, *NO_INTEGERS[:-1]),
    *values("min_new_tokens", -1, *NO_INTEGERS[:-1]),
    *values("n", 0, -1, 10**6, *NO_INTEGERS),
    *values("seed", 2**63, -(2**63) - 1, *NO_INTEGERS),
    *values("stop", ["a"] * 65, "x" * 1025, [1], 3, {"a": 1}, True, [["a"]]),
    *values("stop_regex", "", [""], ["a"] * 17, "x" * 1025, [1], 3, {"a": 1}, True),
    *values("stop_regex", "(", "a{2,1}", "[", "*", "(?P<a>b)(?P=a)", r"(a)\1", "a(?=b)", "(?<!a)b", "(?>a)", "a++"),
    *values("stop_regex", "a*", "$", "^", "(a+)*", "a{9999}", "((a{99}){99}){99}", "(" * 200 + "a" + ")" * 200),
    *values("stop_token_ids", [-1], [1000], [1.5], ["1"], [True], 3, "3", [1] * 5000, [2**70]),
    *values("logit_bias", {"-1": 1}, {"1000": 1}, {"1": 101}, {"1": -101}, {"1": "a"}, {"1": None}, {"a": 1}, [1], 3),
    *values("logit_bias", Raw('{"1": NaN}'), Raw('{"1": Infinity}'), {"1.5": 1}, {str(i): 1 for i in range(5000)}),
    *values("ignore_eos", 1, "true", [True]),
    *values("no_stop_trim", 1, "true"),
    *values("skip_special_tokens", 0, "false"),
    *values("spaces_between_special_tokens", 0, "false"),
    *values("custom_params", [1], "a", 3, {"dry": 3}, {"dry": {"a": "x" * 70000}}),
    *values("custom_logit_processor", "no_such", 3, {"callable": "8004"}, ["dry", "dry"], {"name": "dry", "params": 1}),
    *values("custom_logit_processor", '{"callable": "80049521000000"}', True, [3]),
]


def refused(api: Any, *fields: str) -> list[dict[str, Any]]:
    """The errors of bodies with these fields."""
    sent = [api(one) for one in fields]
    errors = []
    for (_, _, body), (done, reached) in zip(sent, send_all(*sent[0][:2], [body for *_, body in sent]), strict=True):  # type: ignore[call-arg]
        assert done.status == 400, (body[:200], done.status, done.body[:300])
        assert not reached, "the engine has a request that was refused"
        error: dict[str, Any] = done.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert len(error["message"]) < 500, "an error repeats what it was sent"
        errors.append(error)
    return errors


def name_in(error: dict[str, Any]) -> str:
    name = (error["param"] or "").removeprefix("sampling_params.").partition(".")[0]
    return {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}.get(name, name)


@APIS
def test_each_field_that_is_wrong_is_named(api: Any) -> None:
    errors = refused(api, *(f'"{field}": {value}' for field, value in WRONG))
    wrong = {
        (field, value[:40]): error["param"]
        for (field, value), error in zip(WRONG, errors, strict=True)
        if name_in(error) != field
    }
    assert not wrong, f"errors that name another field: {wrong}"


@APIS
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ('"max_new_tokens": 5, "min_new_tokens": 6', {"min_new_tokens"}),
        ('"regex": "a", "ebnf": "root ::= \\"a\\""', {"regex", "ebnf"}),
        ('"custom_logit_processor": {"name": "dry", "params": {}}, "custom_params": {"base": 2}', {"custom_params"}),
        ('"custom_logit_processor": ["dry"], "custom_params": {"other": {}}', {"custom_params"}),
    ],
)
def test_fields_in_conflict(api: Any, fields: str, names: set[str]) -> None:
    (error,) = refused(api, fields)
    assert name_in(error) in names


ALLOWED = [
    '"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0',
    '"temperature": 100, "top_p": 1e-30, "min_p": 1, "top_k": 2147483647',
    '"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2',
    '"max_new_tokens": 0, "min_new_tokens": 0, "n": 1',
    '"seed": 9223372036854775807, "n": 3',
    '"stop": [], "stop_regex": [], "stop_token_ids": [], "logit_bias": {}, "custom_params": {}',
    '"stop": "a", "stop_regex": "a+", "stop_token_ids": [0, 999], "logit_bias": {"0": 100, "999": -100}',
    '"custom_logit_processor": "dry", "custom_params": {"base": 2}',
    '"temperature": null, "stop": null, "seed": null, "logit_bias": null, "stop_regex": null',
]


@APIS
def test_the_ends_of_what_is_allowed_are_allowed(api: Any) -> None:
    sent = [api(fields) for fields in ALLOWED]
    before = 0
    for done, reached in send_all(*sent[0][:2], [body for *_, body in sent]):  # type: ignore[call-arg]
        assert done.status == 200, done.body
        assert reached > before
        before = reached
