"""What intake lets through, and how it says no."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.frontend.intake import Intake, pack_ids
from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.text.encoding import CHARS_PER_TOKEN
from tests.features import FEATURES

INFO = ModelInfo(
    served_name="m", path="m", architecture="x", max_context_len=20, vocab_size=200, max_total_tokens=100,
    dtype="float32", version="0",
)  # fmt: skip


def intake(**info: Any) -> Intake:
    return Intake(dataclasses.replace(INFO, **info), FakeTokenizer(), FEATURES)


def refused(request: GenerateRequest, **info: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        intake(**info).prepare(request)
    return caught.value


def request(prompt: str | list[int] = "abc", sampling: dict[str, Any] | None = None, **more: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(**(sampling or {})), **more)


def test_text_becomes_little_endian_int32() -> None:
    prepared = intake().prepare(request("abc"))
    assert np.frombuffer(prepared.prompt, "<i4").tolist() == [97, 98, 99]
    assert pack_ids([1, 256]) == b"\x01\0\0\0\0\1\0\0"


def test_what_is_unset_follows_the_models_defaults() -> None:
    model = intake(sampling_defaults={"temperature": 0.6, "top_k": 20, "max_new_tokens": 4})
    asked = SamplingParams.of({"top_k": 5, "seed": 1})
    filled = model.prepare(GenerateRequest(prompt="abc", sampling=asked)).sampling
    assert filled == SamplingParams(temperature=0.6, top_k=5, seed=1, max_new_tokens=4)
    assert model.prepare(request(sampling={"seed": 1, "max_new_tokens": 9})).sampling.temperature == 1.0
    too_long = SamplingParams.of({"min_new_tokens": 5})
    with pytest.raises(InvalidRequest, match="min_new_tokens 5 exceeds max_new_tokens 4"):
        model.prepare(GenerateRequest(prompt="abc", sampling=too_long))


def test_names_are_given_and_kept() -> None:
    assert intake().prepare(request(rid="mine")).rid == "mine"
    first, second = intake().prepare(request()), intake().prepare(request())
    assert first.rid
    assert first.rid != second.rid


def test_salts_separate_namespaces() -> None:
    plain, a, b = (intake().prepare(request(cache_salt=salt)).namespace for salt in ("", "a", "b"))
    assert plain == ""
    assert len({plain, a, b}) == 3


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompts(prompt: Any) -> None:
    assert refused(request(prompt)).param == "prompt"


def test_text_without_tokens() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.encode = lambda text, add_special_tokens=True: []  # type: ignore[method-assign, misc]
    with pytest.raises(InvalidRequest, match="no tokens"):
        Intake(INFO, tokenizer).prepare(request("x"))


def test_prompt_leaves_room_for_one_token() -> None:
    assert intake().prepare(request("a" * 19)).sampling.max_new_tokens == 1
    error = refused(request("a" * 20))
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
    assert error.message == (
        "prompt is too long: 20 tokens > 19 maximum; this model's maximum context length is 20 tokens"
    )


def test_text_that_cannot_fit_is_refused_in_the_same_words() -> None:
    error = refused(request("a" * 641))
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
    assert error.message == (
        "prompt is too long: over 20 tokens > 19 maximum; this model's maximum context length is 20 tokens; the text "
        "has 641 characters"
    )


def test_limit_is_the_smaller_of_context_and_pool() -> None:
    assert "10 tokens > 9 maximum" in refused(request("a" * 10), max_total_tokens=10).message
    intake(max_total_tokens=10).prepare(request("a" * 9))


def test_hopeless_text_is_not_tokenised() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.encode = lambda text, add_special_tokens=True: pytest.fail("tokenised")  # type: ignore[method-assign, misc]
    with pytest.raises(InvalidRequest, match="characters"):
        Intake(INFO, tokenizer).prepare(request("a" * (20 * CHARS_PER_TOKEN + 1)))


@pytest.mark.parametrize("token", [-1, 200, 2**40])
def test_ids_out_of_range(token: int) -> None:
    error = refused(request([1, token, 2]))
    assert error.param == "prompt"
    assert str(token) in error.message


def test_the_answer_is_clipped_to_the_context() -> None:
    fit = intake().prepare
    assert fit(request("aaa", {"max_new_tokens": 500})).sampling.max_new_tokens == 17
    assert fit(request("aaa", {"max_new_tokens": 5})).sampling.max_new_tokens == 5
    assert fit(request("aaa", {"max_new_tokens": 0})).sampling.max_new_tokens == 0
    assert fit(request("aaa", {"max_new_tokens": None})).sampling.max_new_tokens == 17
    assert fit(request("aaa", {"max_new_tokens": 50, "min_new_tokens": 40})).sampling.min_new_tokens == 17


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        # Zero as a float32: no token would be left, and the whole batch would fail.
        ({"top_p": 1e-50}, "top_p"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty"),
        # No integer of MessagePack: encoding would fail, for whatever travels along too.
        ({"top_k": 2**70}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": (200,)}, "stop_token_ids"),
        ({"stop_token_ids": (1,) * 5000}, "stop_token_ids"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop_regex": ("a",) * 17}, "stop_regex"),
        ({"stop_regex": ("",)}, "stop_regex"),
        ({"stop_regex": ("a" * 1025,)}, "stop_regex"),
        ({"stop_regex": ("\ud800",)}, "stop_regex"),
        ({"stop_regex": ("a", "(b")}, "stop_regex"),
        ({"stop_regex": (r"(a)\1",)}, "stop_regex"),
        ({"stop_regex": ("a{999}", "b{999}")}, "stop_regex"),
        ({"extra": {"big": "x" * 100_000}}, "custom_params"),
        ({"extra": {"odd": object()}}, "custom_params"),
    ],
)
def test_sampling_is_checked(sampling: dict[str, Any], param: str) -> None:
    assert refused(request(sampling=sampling)).param == param


def test_processors_are_chosen_by_name_and_never_sent_as_code() -> None:
    """What SGLang takes for code, a JSON object with a pickled callable, is a name that nobody has."""
    features = ("logits_processor.dry", "embeddings", "logits_processor.bad_words")
    ask = {"extra": {"dry": {"multiplier": 1}}}
    assert intake(features=features).prepare(request(sampling=ask)).sampling.extra == ask["extra"]
    code = '{"callable": "8004951f0000"}'
    error = refused(request(sampling={"extra": {code: {}}}), features=features)
    assert (error.status, error.param) == (400, "custom_logit_processor")
    assert "dry, bad_words" in error.message
    assert "none" in refused(request(sampling=ask)).message
    assert refused(request(sampling={"extra": {"dry": 3}}), features=features).param == "custom_params.dry"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"rid": "x" * 300}, "rid"),
        ({"rid": "\ud800"}, "rid"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"token_ids_logprob": (500,)}, "token_ids_logprob"),
        ({"token_ids_logprob": (1,) * 5000}, "token_ids_logprob"),
    ],
)
def test_sizes_are_bounded(fields: dict[str, Any], param: str) -> None:
    assert refused(request(**fields)).param == param
