"""The fields of bodies that say how a request is treated."""

from __future__ import annotations

import json

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.http.bodies import validate_body
from pegboard.core.toolkit.http.request_fields import RequestFields


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
