"""The fields of bodies that say how a request is treated."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.plugin import BodyField
from pegboard.toolkit.http import refusals
from pegboard.toolkit.http.bodies import validate_body
from pegboard.toolkit.http.refusals import Refusal, RefusingModel
from pegboard.toolkit.http.request_fields import RequestFields, with_declared


def test_what_is_not_said_has_defaults() -> None:
    for body in (b"{}", b'{"priority": null, "cache_salt": null, "extra_key": null, "params": null}'):
        found = validate_body(body, RequestFields)
        assert (found.priority, found.cache_salt, found.extra_key, found.params, found.salt) == (0, "", "", {}, "")


@pytest.mark.parametrize(("name", "value"), [("priority", "1"), ("cache_salt", 1), ("extra_key", []), ("params", [])])
def test_odd_values(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        validate_body(json.dumps({name: value}).encode(), RequestFields)
    assert (error.value.status, error.value.param) == (400, name)


def test_two_names_make_one_salt() -> None:
    salts = [RequestFields(cache_salt=salt, extra_key=key).salt for salt in ("", "a", "ab") for key in ("", "b", "ab")]
    assert len(set(salts)) == len(salts)
    assert RequestFields(cache_salt="a").salt == "a"


def test_documents_explain_the_fields() -> None:
    schema = RequestFields.model_json_schema()["properties"]
    assert schema["cache_salt"]["description"].startswith("Cached prefixes are shared only")
    assert schema["params"]["description"].startswith("What the request says to plugins")


class Asking(RequestFields, RefusingModel):
    """A body of a test."""

    refused = {"room": Refusal(), "other": Refusal()}

    prompt: str = ""

    def check(self) -> None:
        """A method, after which a provider's field may be called."""


FIELDS = {
    "gate": (BodyField("room", int, meaning="Where it goes."), BodyField("host", str)),
    "policy": (BodyField("check", bool, each=False), BodyField("due", float)),
}
DECLARED = with_declared(Asking, FIELDS)


def told(answers: Sequence[int], **body: object) -> list[object]:
    return [*validate_body(json.dumps(body).encode(), DECLARED).params_of(answers)]


def refusal(answers: Sequence[int], **body: object) -> tuple[int, str | None, str]:
    with pytest.raises(InvalidRequest) as error:
        told(answers, **body)
    return error.value.status, error.value.param, error.value.message


def test_only_fields_that_nobody_reads_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "_reported", set())
    with caplog.at_level(logging.INFO, logger=refusals.__name__):
        assert told([1], room=5, check=True, prompt="x", nobody=1) == [{"gate": {"room": 5}, "policy": {"check": True}}]
    assert [record.args for record in caplog.records] == [("nobody",)]


def test_without_declared_fields_nothing_is_made_and_nothing_copied() -> None:
    assert with_declared(Asking, {}) is with_declared(Asking, {"gate": ()}) is Asking
    body = Asking(params={"gate": {"room": 1}})
    assert all(one is body.params for one in body.params_of((1, 2)))
    assert len(body.params_of((1, 2))) == 3
    with pytest.raises(InvalidRequest, match="room is not supported"):
        validate_body(b'{"room": 5}', Asking)


def test_fields_reach_their_providers() -> None:
    assert told((1,)) == [{}]
    assert told((1,), room=None, host=None) == [{}]
    assert told((1,), room=5, host="a", check=False) == [{"gate": {"room": 5, "host": "a"}, "policy": {"check": False}}]
    assert told((1,), room=[2**63 - 1], due=2) == [{"gate": {"room": 2**63 - 1}, "policy": {"due": 2.0}}]
    # Languages that write all numbers with a point.
    assert told((1,), room=5.0) == [{"gate": {"room": 5}}]
    assert "other" in str(refusal((1,), other=1)), "what is not declared is refused as before"


@pytest.mark.parametrize(
    ("answers", "room", "expected"),
    [
        ((2,), 7, [7, 7]),
        ((2,), [7, 8], [7, 8]),
        ((2,), [7], [7, 7]),
        ((1, 1, 1), [7, 8, 9], [7, 8, 9]),
        ((1, 1), 7, [7, 7]),
        ((2, 1), [7, 8], [7, 7, 8]),
        ((2, 1), [7, 8, 9], [7, 8, 9]),
        ((2, 2), [7, None], [7, 7, None, None]),
    ],
)
def test_a_body_of_several_requests(answers: tuple[int, ...], room: object, expected: list[int | None]) -> None:
    """Each is told which one it is, where it is told anything."""
    assert told(answers, room=room) == [
        {} if one is None else {"gate": {"room": one, "index": index}} for index, one in enumerate(expected)
    ]


def test_the_index_goes_to_each_provider_that_is_told_something() -> None:
    first, second = told((2,), room=[None, 7], due=1.5)
    assert first == {"policy": {"due": 1.5, "index": 0}}
    assert second == {"gate": {"room": 7, "index": 1}, "policy": {"due": 1.5, "index": 1}}


def test_what_else_params_say_stays() -> None:
    params = {"gate": {"act": "wait", "index": 9}, "other": 3}
    found = told((2,), room=7, params=params)
    assert found == [{"gate": {"act": "wait", "room": 7, "index": index}, "other": 3} for index in range(2)], (
        "the server says which request it is"
    )
    assert told((2,), params=params) == [params, params]


@pytest.mark.parametrize(
    ("answers", "body", "param", "message"),
    [
        ((1,), {"room": "5"}, "room", "valid integer"),
        ((1,), {"room": 5.5}, "room", "valid integer"),
        ((1,), {"room": True}, "room", "valid integer"),
        ((1,), {"room": 2**63}, "room", "less than"),
        ((1,), {"room": {"a": 1}}, "room", "valid integer"),
        ((2,), {"host": ["a", 5]}, "host", "valid string"),
        ((1,), {"check": 1}, "check", "valid boolean"),
        ((2,), {"check": [True, False]}, "check", "valid boolean"),
        ((1,), {"due": "soon"}, "due", "valid number"),
        ((1,), {"room": []}, "room", "room has 0 entries; here a list needs one, for the one request"),
        ((2,), {"room": [1, 2, 3]}, "room", "needs one for each of the 2 requests"),
        ((2, 2, 1), {"host": ["a"] * 4}, "host", "needs one for each of the 3 prompts, or of the 5 answers"),
        ((1,), {"room": 5, "params": {"gate": "x"}}, "params.gate", "must be an object beside room"),
        ((1,), {"room": 5, "params": {"gate": {"room": 5}}}, "room", "given twice: here, and in params.gate"),
    ],
)
def test_what_is_wrong_with_a_declared_field(
    answers: tuple[int, ...], body: dict[str, object], param: str, message: str
) -> None:
    status, named, text = refusal(answers, **body)
    assert (status, named) == (400, param)
    assert message in text


def test_documents_have_declared_fields() -> None:
    schema = DECLARED.model_json_schema()
    assert (schema["title"], schema["description"]) == ("Asking", "A body of a test.")
    room, check = schema["properties"]["room"], schema["properties"]["check"]
    assert room["description"] == "Where it goes. (For gate; a list has one for each prompt, or for each answer.)"
    assert [one.get("type") for one in room["anyOf"]] == ["integer", "array", "null"]
    assert [one.get("type") for one in check["anyOf"]] == ["boolean", "null"]
    assert set(Asking.model_json_schema()["properties"]) == set(schema["properties"]) - {"room", "host", "check", "due"}


def test_declared_fields_are_not_reported_as_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "_reported", set())
    with caplog.at_level(logging.INFO, logger=refusals.__name__):
        told((1,), room=1, host="x", due=1.5, unheard_of=1)
    assert [record.args for record in caplog.records] == [("unheard_of",)]
