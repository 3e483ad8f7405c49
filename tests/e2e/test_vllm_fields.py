"""vLLM's names for constraints, through OpenAI's client and a whole server of default processors: a random model says
what it is made to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pegboard.conformance.servers import Served
from tests.e2e.clients import KEY, MODEL, assert_balanced, tiny_model, tiny_server

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "user", "content": "hello"}]
ODD = ['"no" \\ way', "[x]*.?|(y)\nz", "caf\u00e9"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_model(tmp_path_factory.mktemp("model"))) as one:
        yield one
        assert_balanced(one)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as one:
        yield one


def chat(client: openai.OpenAI, *, n: int = 1, max_tokens: int = 24, **extra: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=HELLO, n=n, max_tokens=max_tokens, seed=1, extra_body=extra
    )


@pytest.mark.parametrize("form", [{"guided_choice": ODD}, {"structured_outputs": {"choice": ODD}}], ids=str)
def test_an_answer_is_one_of_the_choices(client: openai.OpenAI, form: dict[str, Any]) -> None:
    answers = chat(client, n=16, max_tokens=100, **form).choices
    assert {one.finish_reason for one in answers} == {"stop"}
    assert {one.message.content for one in answers} <= set(ODD)


def test_a_choice_that_no_grammar_can_be_made_of_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, structured_outputs={"grammar": "no grammar"})
    assert caught.value.param == "structured_outputs.grammar"


def test_an_answer_has_the_allowed_tokens_only(client: openai.OpenAI) -> None:
    ids = [40, 41, 42]
    found = chat(client, n=8, allowed_token_ids=ids, return_token_ids=True, temperature=5.0)
    seen = {token for one in found.choices for token in one.token_ids}
    assert seen == set(ids)
    assert all(len(one.token_ids) == 24 for one in found.choices)


def test_words_do_not_come(client: openai.OpenAI) -> None:
    """Of three letters, all that may come, one is forbidden."""
    free = chat(client, n=4, guided_regex="[abc]{20}").choices
    assert any("b" in one.message.content for one in free)
    assert not any(
        "b" in one.message.content for one in chat(client, n=4, guided_regex="[abc]{20}", bad_words=["b"]).choices
    )


def test_token_ids_are_those_of_the_prompt_and_the_answer(client: openai.OpenAI) -> None:
    whole: Any = client.completions.create(
        model=MODEL, prompt="hello there", max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    [choice] = whole.choices
    asked = client.post("/tokenize", body={"model": MODEL, "prompt": "hello there"}, cast_to=object)
    assert isinstance(asked, dict)
    assert choice.prompt_token_ids == asked["tokens"]
    assert len(choice.token_ids) == whole.usage.completion_tokens
    chunks: list[Any] = list(
        client.completions.create(
            model=MODEL,
            prompt=choice.prompt_token_ids,
            max_tokens=8,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        )
    )
    assert [token for one in chunks for token in one.choices[0].token_ids] == choice.token_ids
    assert chunks[0].choices[0].prompt_token_ids == choice.prompt_token_ids
