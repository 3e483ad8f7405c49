"""Several requests read together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient
from pegboard.core.interfaces.client import GenerateRequest, ModelInfo, OutputChunk, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.toolkit.http.bodies import validate_body
from pegboard.toolkit.http.generation import (
    Answer,
    Answers,
    SamplingFields,
    check_model,
    for_answer,
)
from pegboard.toolkit.http.processors import processors_of

TEXT = "".join(SCRIPT)


def requests(*rids: str) -> list[GenerateRequest]:
    return [GenerateRequest(prompt="Hi", rid=rid) for rid in rids]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(asyncio.ensure_future(scene()), 30)

    asyncio.run(whole())


@pytest.mark.parametrize("rids", [("a",), ("a", "b", "c")])
def test_collect(rids: tuple[str, ...]) -> None:
    async def scene() -> None:
        client = FakeEngineClient()
        answers = await Answers.submit(client, requests(*rids))
        done = await answers.collect()
        assert [(one.rid, one.text, one.completion_tokens) for one in done] == [(rid, TEXT, len(TEXT)) for rid in rids]
        assert client.aborted == []

    play(scene)


def test_chunks_come_as_they_come() -> None:
    async def scene() -> None:
        answers = await Answers.submit(FakeEngineClient(), requests("a", "b"))
        seen = [(index, chunk.text) async for index, chunk in answers.chunks()]
        for index in (0, 1):
            assert [text for i, text in seen if i == index] == list(SCRIPT)

    play(scene)


def test_one_refusal_aborts_the_others() -> None:
    class Picky(FakeEngineClient):
        async def submit(self, request: GenerateRequest) -> OutputStream:
            stream = await super().submit(request)
            if request.rid == "bad":
                raise InvalidRequest("not you")
            return stream

    async def scene() -> None:
        client = Picky()
        with pytest.raises(InvalidRequest, match="not you"):
            await Answers.submit(client, requests("a", "bad", "b"))
        assert sorted(client.aborted) == ["a", "b"]

    play(scene)


@pytest.mark.parametrize("rids", [("a",), ("a", "b")])
def test_failure_is_raised_and_aborts_the_rest(rids: tuple[str, ...]) -> None:
    async def scene() -> None:
        client = FakeEngineClient(fail_at=1)
        answers = await Answers.submit(client, requests(*rids))
        with pytest.raises(InvalidRequest):
            await answers.collect()
        assert set(client.aborted) <= set(rids[1:])
        assert len(asyncio.all_tasks()) == 2, "a pump goes on"

    play(scene)


def test_cancelling_aborts_everything() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=1)
        answers = await Answers.submit(client, requests("a", "b"))
        task = asyncio.ensure_future(answers.collect())
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.aborted == ["a", "b"]
        assert len(asyncio.all_tasks()) == 2, "a pump goes on"

    play(scene)


def sampling(body: bytes, **more: object) -> SamplingParams:
    return validate_body(body, SamplingFields).sampling_params(max_new_tokens=5, min_new_tokens=0, **more)  # type: ignore[arg-type]


def test_a_text_is_a_list_of_one() -> None:
    assert sampling(b'{"stop": "a", "stop_regex": "b+"}').stop == ("a",)
    assert sampling(b'{"stop": "a", "stop_regex": "b+"}').stop_regex == ("b+",)
    assert sampling(b'{"stop": ["a", "c"], "stop_regex": ["b", "d"]}').stop_regex == ("b", "d")
    assert sampling(b"{}").filled({}) == SamplingParams(max_new_tokens=5)


def test_what_a_body_leaves_out_is_left_to_the_model() -> None:
    """Null, too, stands for the default; the body's own default is none of the client's."""
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    body = b'{"temperature": null, "top_p": 1.0, "seed": 3}'
    assert sampling(body).filled(defaults) == SamplingParams(temperature=0.6, top_k=20, seed=3, max_new_tokens=5)
    assert sampling(body, temperature=0.0).filled(defaults).temperature == 0.0, "the router says it"
    read = validate_body(body, SamplingFields)
    found = {name: read.in_force(name, defaults) for name in ("temperature", "top_p", "min_p")}
    assert found == {"temperature": 0.6, "top_p": 1.0, "min_p": 0.0}


def test_answers_share_all_but_their_seeds() -> None:
    params = sampling(b'{"seed": 7, "logit_bias": {"5": 1}}')
    assert [for_answer(params, i).seed for i in range(3)] == [7, 8, 9]
    assert for_answer(params, 2).logit_bias is params.logit_bias
    assert for_answer(sampling(b"{}"), 2).seed is None


def test_parameters_of_processors() -> None:
    assert sampling(b'{"custom_params": {"mine": {"a": 1}}}').extra == {"mine": {"a": 1}}
    assert sampling(b'{"custom_params": {"a": 1}}', processor="mine").extra == {"mine": {"a": 1}}
    assert sampling(b"{}", processor="mine").extra == {"mine": {}}


def test_further_fields_take_precedence() -> None:
    grammar = Grammar("regex", "a+")
    params = sampling(b'{"seed": 1, "temperature": 0.5}', grammar=grammar, seed=3)
    assert (params.grammar, params.seed, params.temperature) == (grammar, 3, 0.5)


def test_bias_must_name_tokens() -> None:
    with pytest.raises(InvalidRequest, match="token ids") as caught:
        sampling(b'{"logit_bias": {"the": 1}}', prefix="sampling_params.")
    assert caught.value.param == "sampling_params.logit_bias"


def test_an_answer_is_the_sum_of_its_chunks() -> None:
    answer = Answer("a")
    answer.add(
        OutputChunk("a", "x", [1], None, 3, 1, 2, logprobs=[(-1.0, 1, [])], input_logprobs=[(None, 5, [])],
                    hidden_states=[[0.5]], drafted_tokens=4, accepted_tokens=3)
    )  # fmt: skip
    answer.add(
        OutputChunk("a", "y", [2], {"type": "length"}, 3, 2, 2, 1, logprobs=[(-2.0, 2, [])], hidden_states=[[1]])
    )
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("xy", [1, 2], {"type": "length"})
    assert (answer.completion_tokens, answer.num_retractions) == (2, 1)
    assert [value for value, _, _ in answer.logprobs] == [-1.0, -2.0]
    assert answer.input_logprobs == [(None, 5, [])]
    assert answer.hidden_states == [[0.5], [1]]
    assert (answer.drafted_tokens, answer.accepted_tokens) == (4, 3), "a chunk of a plain step does not say them"


@pytest.mark.parametrize(
    ("chosen", "params", "extra"),
    [
        ("", {}, {}),
        ("", {"dry": {"base": 2}}, {"dry": {"base": 2}}),
        ("dry", {}, {"dry": {}}),
        ("dry", {"base": 2}, {"dry": {"base": 2}}),
        ({"name": "dry"}, {"base": 2}, {"dry": {"base": 2}}),
        ({"name": "dry", "params": {"base": 2}}, {}, {"dry": {"base": 2}}),
        (["dry", {"name": "own", "params": {"a": 1}}], {"dry": {"base": 2}}, {"dry": {"base": 2}, "own": {"a": 1}}),
        (["dry", "own"], {}, {"dry": {}, "own": {}}),
    ],
)
def test_logits_processors_by_name(chosen: object, params: dict[str, object], extra: dict[str, object]) -> None:
    assert processors_of(chosen, params) == extra
    body = SamplingFields.model_validate({"custom_logit_processor": chosen, "custom_params": params})
    assert body.sampling_params(max_new_tokens=1, min_new_tokens=0).extra == extra


@pytest.mark.parametrize(
    ("chosen", "params", "param"),
    [
        ({"callable": "8004951f"}, {}, "custom_logit_processor"),
        ({"name": "dry", "callable": "8004951f"}, {}, "custom_logit_processor"),
        ({"name": 3}, {}, "custom_logit_processor"),
        ([""], {}, "custom_logit_processor"),
        ([["dry"]], {}, "custom_logit_processor"),
        (["dry", "dry"], {}, "custom_logit_processor"),
        ({"name": "dry", "params": [1]}, {}, "custom_logit_processor"),
        (["dry"], {"dry": 3}, "custom_logit_processor"),
        ({"name": "dry", "params": {"base": 2}}, {"base": 2}, "custom_params"),
        (["dry"], {"own": {}}, "custom_params"),
        ([{"name": "dry", "params": {}}], {"dry": {}}, "custom_params"),
    ],
)
def test_logits_processors_that_are_none(chosen: object, params: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        processors_of(chosen, params, "sampling_params.")
    assert (caught.value.status, caught.value.param) == (400, f"sampling_params.{param}")


@pytest.mark.parametrize(
    ("seed", "seeds"), [(5, [5, 6, 7]), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]), (-1, [-1, 0, 1])]
)
def test_every_answer_has_a_seed_of_its_own(seed: int, seeds: list[int]) -> None:
    body = SamplingFields(seed=seed)
    made = [for_answer(body.sampling_params(max_new_tokens=1, min_new_tokens=0), answer) for answer in range(3)]
    assert [one.seed for one in made] == seeds
    for one in made:
        one.validate()


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_seeds_of_more_than_64_bits_are_left_to_be_refused(seed: int) -> None:
    params = for_answer(SamplingFields(seed=seed).sampling_params(max_new_tokens=1, min_new_tokens=0), 1)
    with pytest.raises(InvalidRequest, match="64 bits"):
        params.validate()


def test_the_served_model_has_a_name_and_a_path() -> None:
    async def scene() -> ModelInfo:
        return FakeEngineClient().info

    info = asyncio.run(scene())
    for name in ("", "fake-model", "/models/fake"):
        check_model(info, name)
    with pytest.raises(InvalidRequest, match="'gpt-5' does not exist; this server has 'fake-model'") as caught:
        check_model(info, "gpt-5")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def constrained(*rids: str, stream: bool = True) -> list[GenerateRequest]:
    sampling = SamplingParams(grammar=Grammar("regex", "a"))
    return [GenerateRequest(prompt="Hi", rid=rid, stream=stream, sampling=sampling) for rid in rids]


@pytest.mark.parametrize("rids", [("a",), ("a", "b")])
def test_a_stream_with_a_grammar_has_begun(rids: tuple[str, ...]) -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=0)
        submitting = asyncio.ensure_future(Answers.submit(client, constrained(*rids)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not submitting.done(), "its grammar may turn out to be no good"
        client.release.set()
        answers = await submitting
        seen = [(index, chunk.text) async for index, chunk in answers.chunks()]
        for index in range(len(rids)):
            assert [text for i, text in seen if i == index] == list(SCRIPT), "nothing is lost, and in order"

    play(scene)


@pytest.mark.parametrize("rids", [("a",), ("a", "b")])
def test_a_grammar_that_is_no_good_is_a_refusal(rids: tuple[str, ...]) -> None:
    async def scene() -> None:
        client = FakeEngineClient(fail_at=0)
        with pytest.raises(InvalidRequest):
            await Answers.submit(client, constrained(*rids))
        assert client.finished == []

    play(scene)


def test_only_streams_wait_for_it() -> None:
    async def scene() -> None:
        client = FakeEngineClient(fail_at=0)
        answers = await Answers.submit(client, constrained("a", stream=False))
        with pytest.raises(InvalidRequest):
            await answers.collect()

    play(scene)


def test_who_leaves_before_a_stream_has_begun_is_aborted() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=0)
        submitting = asyncio.ensure_future(Answers.submit(client, constrained("a", "b")))
        for _ in range(20):
            await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert sorted(client.aborted) == ["a", "b"]

    play(scene)
