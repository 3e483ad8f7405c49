"""Refusals in the words of the body that was refused."""

from __future__ import annotations

import pickle

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt": "messages",
    "stop": "stop_sequences",
    "json_schema": "response_format.json_schema.schema",
}


def test_errors_in_a_bodys_own_words() -> None:
    error = InvalidRequest("max_new_tokens of this prompt", param="max_new_tokens", code="x", status=418)
    said = error.called(NAMES)
    assert (said.message, said.param, said.code, said.status) == ("max_tokens of this prompt", "max_tokens", "x", 418)
    assert str(said) == said.message
    assert InvalidRequest("no", param="top_p").called(NAMES).param == "top_p"
    assert InvalidRequest("no").called(NAMES).param is None


@pytest.mark.parametrize("param", ["prompt", "stop"])
def test_a_field_may_be_a_word_of_the_message(param: str) -> None:
    said = InvalidRequest(f"{param} it", param=param).called(NAMES)
    assert (said.message, said.param) == (f"{param} it", NAMES[param])


def test_a_message_may_name_two_fields() -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(min_new_tokens=5, max_new_tokens=3).validate()
    assert error.value.message == "min_new_tokens 5 exceeds max_new_tokens 3"
    said = error.value.called({**NAMES, "max_new_tokens": "max_completion_tokens"})
    assert (said.message, said.param) == ("min_tokens 5 exceeds max_completion_tokens 3", "min_tokens")


def test_only_fields_that_the_error_names_are_renamed() -> None:
    text = "json_schema: 'max_new_tokens' and 'json_schema' are no keywords"
    said = InvalidRequest(text, param="json_schema").called(NAMES)
    assert said.message == f"{NAMES['json_schema']}: 'max_new_tokens' and 'json_schema' are no keywords"
    assert InvalidRequest("max_new_tokens", param="top_k").called(NAMES).message == "max_new_tokens"


def test_the_field_stands_where_it_stands() -> None:
    said = InvalidRequest("too long, and max_new_tokens asks for 5", param="max_new_tokens").called(NAMES)
    assert said.message == "too long, and max_tokens asks for 5"


def test_it_travels_whole() -> None:
    error = InvalidRequest("min_new_tokens a", param="min_new_tokens", code="x", status=418, fields=("max_new_tokens",))
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is InvalidRequest
    assert vars(found) == vars(error)
