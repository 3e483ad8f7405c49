"""/v1/completions on a scripted engine. Answers are read by the types of OpenAI's own client, strictly."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient, FakeStream
from pegboard.core.interfaces.sampling import Grammar
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import COMPLETIONS, ask

TEXT = "".join(SCRIPT)


def complete(**body: Any) -> tuple[dict[str, Any], FakeEngineClient]:
    answer, client = asking.post(COMPLETIONS, {"model": "fake-model", "prompt": "Hi", **body})
    if not body.get("echo"):
        # OpenAI's type knows no null for a prompt's first token, though its server answers so.
        Completion.model_validate(answer, strict=True)
    return answer, client


def stream(**body: Any) -> list[dict[str, Any]]:
    return asking.stream(COMPLETIONS, {"prompt": "Hi", **body})


def test_completion() -> None:
    body, client = complete()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == TEXT
    assert client.requests[0].sampling.max_new_tokens == 16
    assert client.requests[0].add_special_tokens


def test_stream() -> None:
    chunks = stream()
    assert [one["choices"][0]["text"] for one in chunks] == list(SCRIPT)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2]], 2)])
def test_prompts_of_all_kinds(prompt: Any, count: int) -> None:
    body, client = complete(prompt=prompt)
    assert [one["index"] for one in body["choices"]] == list(range(count))
    assert [one.prompt for one in client.requests] == (prompt if count > 1 else [prompt])


def test_n_answers() -> None:
    body, client = complete(prompt=["a", "bb"], n=2, seed=5)
    assert len(body["choices"]) == 4
    assert [one.prompt for one in client.requests] == ["a", "a", "bb", "bb"]
    assert [one.sampling.seed for one in client.requests] == [5, 6, 5, 6]
    assert body["usage"]["prompt_tokens"] == 3, "a prompt counts once"


def test_echo() -> None:
    assert complete(echo=True)[0]["choices"][0]["text"] == "Hi" + TEXT
    assert complete(echo=True, prompt=[72, 105])[0]["choices"][0]["text"] == "Hi" + TEXT
    assert "".join(one["choices"][0]["text"] for one in stream(echo=True)) == "Hi" + TEXT
    assert complete(echo=True)[1].requests[0].logprob_start is None, "nobody asked for any"


def test_echo_of_nothing_else() -> None:
    _, client = complete(echo=True, max_tokens=0, logprobs=1)
    assert client.requests[0].sampling.max_new_tokens == 0


def test_logprobs() -> None:
    logprobs = complete(logprobs=1)[0]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(TEXT)
    assert logprobs["top_logprobs"][0] == {"A": -0.5, "O": -0.5}, "the sampled one is there in any case"
    assert logprobs["text_offset"] == list(range(len(TEXT)))
    assert complete(logprobs=0)[0]["choices"][0]["logprobs"]["top_logprobs"] is None
    offsets = [one["choices"][0]["logprobs"]["text_offset"][0] for one in stream(logprobs=0)]
    assert offsets == [0, len(SCRIPT[0]), len(SCRIPT[0] + SCRIPT[1])]


def test_echo_with_logprobs() -> None:
    body, client = complete(echo=True, logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    assert client.requests[0].logprob_start == 0
    assert logprobs["tokens"] == list("Hi" + TEXT)
    assert logprobs["token_logprobs"][:2] == [None, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"A": -0.5, "i": -0.5}]
    assert logprobs["text_offset"] == list(range(len("Hi" + TEXT)))
    first, *others = stream(echo=True, logprobs=1)
    assert first["choices"][0]["text"] == "Hi" + SCRIPT[0]
    columns = [one["choices"][0]["logprobs"] for one in (first, *others)]
    assert {name: [value for one in columns for value in one[name]] for name in logprobs} == logprobs


def test_prompt_logprobs() -> None:
    body, client = complete(prompt="abc", prompt_logprobs=0)
    assert client.requests[0].logprobs == 0
    choice = body["choices"][0]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": None, "decoded_token": "b"}},
        {"99": {"logprob": -0.5, "rank": None, "decoded_token": "c"}},
    ]


def test_impossible_tokens_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON knows no infinity, and OpenAI's clients expect numbers."""

    def impossible(self: FakeStream, ids: list[int]) -> Any:
        return [(float("-inf"), token, [(-0.1, 65)]) for token in ids]

    monkeypatch.setattr(FakeStream, "_logprobs", impossible)
    logprobs = complete(logprobs=1)[0]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == -9999.0
    assert logprobs["top_logprobs"][0] == {"A": -0.1, "O": -9999.0}


def test_the_best_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    def likely(self: FakeStream, ids: list[int]) -> Any:
        return [(-1.0 / (1 + int(self.rid.rpartition("_")[2])), token, []) for token in ids]

    monkeypatch.setattr(FakeStream, "_logprobs", likely)
    body, client = complete(prompt=["a", "b"], n=2, best_of=3, logprobs=0)
    assert len(client.requests) == 6
    assert [one.prompt for one in client.requests] == ["a"] * 3 + ["b"] * 3
    best = [one["logprobs"]["token_logprobs"][0] for one in body["choices"]]
    assert best == [-1 / 3, -1 / 2, -1 / 6, -1 / 5]
    assert [one["index"] for one in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 6 * len(TEXT), "all that was generated"
    assert body["usage"]["prompt_tokens"] == 2
    assert complete(best_of=2)[0]["choices"][0]["logprobs"] is None, "nobody asked for them"


def test_grammars() -> None:
    assert complete(regex="a+")[1].requests[0].sampling.grammar == Grammar("regex", "a+")
    form = {"type": "json_object"}
    assert complete(response_format=form)[1].requests[0].sampling.grammar == Grammar("json_object")


def test_hidden_states() -> None:
    assert len(complete(return_hidden_states=True)[0]["choices"][0]["hidden_states"]) == len(TEXT)
    states = [one["choices"][0]["hidden_states"] for one in stream(return_hidden_states=True)]
    assert [len(one) for one in states] == [len(piece) for piece in SCRIPT]


def test_what_stages_tell() -> None:
    told = {"green": [1, 0]}
    assert asking.post(COMPLETIONS, {"prompt": "a"}, extra=told)[0]["choices"][0]["extra"] == told
    chunks = asking.stream(COMPLETIONS, {"prompt": "a"}, extra=told)
    assert [one["choices"][0].get("extra") for one in chunks] == [None] * (len(chunks) - 1) + [told]
    assert "extra" not in complete()[0]["choices"][0]


def test_failure_of_one_answer_of_several_is_an_error() -> None:
    done, client = ask("POST", COMPLETIONS, {"prompt": ["a", "b"]}, fail_at=1)
    assert done.status == 503
    assert len(client.requests) == 2
