"""What one request may cost the others: products of fields that froze a server, starved it or lost tokens.

Every test counts work, bytes or calls. Attacks on a whole server are measured by benchmarks/attacks.py.
"""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.frontend.outputs import OutputState, merge
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import Accepted, TokenOutput, TokenOutputs
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.points import encoded
from pegboard.core.server.client import AsyncEngineClient
from pegboard.plugins.api_native.responses import Responder
from pegboard.toolkit.http.answer_stream import AnswerWriter, _Direct
from pegboard.toolkit.http.budget import (
    BILL,
    ENTRY_BYTES,
    FREE_BYTES,
    PROMPT_BYTES,
    REQUEST_BYTES,
    Bill,
    BudgetLimits,
)
from pegboard.toolkit.http.generation import Answer
from pegboard.toolkit.system.wire import (
    ApiWire,
    Endpoint,
    SchedulerWire,
    WireError,
    decode_from_scheduler,
    output_frames,
)
from pegboard.toolkit.text.encoding import LONG_CHARS, encode
from pegboard.toolkit.text.stop import compiled
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.faults.stage import play, refused, submitted

PIECE, MOST = 2_000, 20_000

# ---- 1. a step's output is never dropped ----------------------------------------------------------------------------


def output(rid: str, tokens: int, entries: int, **more: Any) -> TokenOutput:
    logprobs = [(-1.0, token, [(-2.0, i) for i in range(entries)]) for token in range(tokens)]
    return TokenOutput(rid=rid, token_ids=list(range(tokens)), logprobs=logprobs, **more)


def sent(frames: Sequence[bytes]) -> dict[str, TokenOutput]:
    """What a reader has of each request once it has merged everything."""
    found: dict[str, TokenOutput] = {}
    for frame in frames:
        message = decode_from_scheduler(frame)
        assert isinstance(message, TokenOutputs)
        for one in message.outputs:
            found[one.rid] = merge(found[one.rid], one) if one.rid in found else one
    return found


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=6))
def test_outputs_that_are_split_are_what_they_were(sizes: list[tuple[int, int, bool]]) -> None:
    outputs = []
    for i, (tokens, entries, last) in enumerate(sizes):
        more: dict[str, Any] = {"rows": {"acme": [encoded(bytes(range(8)))] * tokens}}
        if last:
            more |= {"finish_reason": {"type": "length"}, "prompt_tokens": 3, "completion_tokens": tokens + 5}
            more["features"] = {"acme": encoded([(None, 1, []), (-0.5, 2, [(-0.5, 2)])])}
        outputs.append(output(f"r{i}", tokens, entries, **more))
    frames, refused = output_frames(outputs, PIECE, MOST)
    assert not refused
    assert list(sent(frames).values()) == outputs
    one_token = max(len(output_frames([output("r0", 1, entries)], 1)[0][0]) for _, entries, _ in sizes)
    assert max(map(len, frames)) <= max(PIECE, one_token + 300)


def test_an_output_that_fits_into_no_frame_fails_alone() -> None:
    outputs = [output("innocent", 1, 0), output("greedy", 1, 3_000), output("another", 2, 2)]
    frames, refused = output_frames(outputs, PIECE, MOST)
    found = sent(frames)
    assert refused == ["greedy"]
    assert [found["innocent"], found["another"]] == [outputs[0], outputs[2]]
    assert found["greedy"].finish_reason is not None
    assert (found["greedy"].finish_reason["status"], found["greedy"].finish_reason["code"]) == (500, "output_too_large")


def test_a_large_step_arrives_in_turns() -> None:
    """The reader takes it in pieces, and other tasks run in between."""
    outputs = [output(f"r{i}", 8, 1_000) for i in range(32)]

    async def scene() -> None:
        endpoint = Endpoint()
        api, scheduler = ApiWire(endpoint), SchedulerWire(endpoint.address)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        try:
            assert scheduler.send_outputs(outputs) == []
            other = asyncio.ensure_future(count())
            messages: list[Any] = []
            pieces = 0
            while sum(len(one.outputs) for one in messages) < len(outputs):
                before = turns
                messages += await asyncio.wait_for(api.receive(), 10)
                pieces += 1
                assert turns > before
            other.cancel()
            assert pieces >= 8
            assert [one for message in messages for one in message.outputs] == outputs
        finally:
            scheduler.close()
            api.close()
            endpoint.close()

    asyncio.run(scene())


def test_a_message_that_is_missing_is_an_error() -> None:
    """ZeroMQ drops without a word what is too large for it."""

    async def scene() -> None:
        endpoint = Endpoint()
        api, scheduler = ApiWire(endpoint), SchedulerWire(endpoint.address)
        try:
            scheduler.send([Accepted(rid="a")])
            assert await asyncio.wait_for(api.receive(), 10) == [Accepted(rid="a")]
            scheduler._given.give()
            scheduler.send([Accepted(rid="b")])
            with pytest.raises(WireError, match="message 1 is missing"):
                await asyncio.wait_for(api.receive(), 10)
        finally:
            scheduler.close()
            api.close()
            endpoint.close()

    asyncio.run(scene())


# ---- 2. streams -----------------------------------------------------------------------------------------------------


class Counting(AnswerWriter):
    def __init__(self) -> None:
        self.events = 0

    def more(self, index: int, chunk: OutputChunk) -> bytes:
        self.events += 1
        return b"x"


class Body:
    gone = False

    def write(self, data: bytes) -> bool:
        return True

    async def drain(self) -> None: ...


def test_nothing_is_written_for_a_client_that_has_gone() -> None:
    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        answers = await submitted(client, wire, GenerateRequest(prompt="Hi", rid="r", stream=True))
        writer, body = Counting(), Body()
        direct = _Direct(answers, writer, body, lambda error: b"")
        direct.start()
        await wire.say(TokenOutputs(outputs=[TokenOutput(rid="r", token_ids=[65])]))
        assert writer.events == 1
        body.gone = True
        for _ in range(20):
            await wire.say(TokenOutputs(outputs=[TokenOutput(rid="r", token_ids=[65])]))
        assert writer.events == 1
        direct.stop()
        await answers.aclose()

    play(scene)


def test_a_stream_costs_what_its_answer_does() -> None:
    """Log-probabilities are in one event each: before, event n repeated those of all n tokens."""
    wanted = GenerateRequest(prompt="Hi", logprobs=20, stream=True)
    responder = Responder(FakeTokenizer(), text_in_logprobs=False)
    entry = (-1.5, 65, [(-1.5, 65)] * 20)
    answer, sizes = Answer("r"), []
    for _ in range(200):
        chunk = OutputChunk("r", "a", [65], None, 1, 1, 0, logprobs=[entry])
        answer.add(chunk, whole=False)
        sizes.append(len(json.dumps(responder.event(wanted, answer, chunk, 0.0))))
    # What still grows is a character of text and a token id.
    assert sizes[-1] - sizes[0] < 200 * 8
    assert not answer.logprobs


# ---- 3. tokenising --------------------------------------------------------------------------------------------------


def test_tokenising_lets_other_threads_run(tiny_tokenizer: Tokenizer) -> None:
    """With the interpreter's lock held, the other thread would get no turn at all."""
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.0005):
            turns += 1

    text = "some words and others " * 20_000
    other = threading.Thread(target=count)
    other.start()
    before = turns
    ids = tiny_tokenizer.encode(text)
    during = turns - before
    text_again = tiny_tokenizer.decode(ids)
    over.set()
    other.join()
    assert text_again.strip() == text.strip()
    assert during >= 3


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from pegboard.conformance.checkpoints import tiny_checkpoint

    return Tokenizer.from_directory(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1))


class Slow(FakeTokenizer):
    """Counts calls, and how many there are at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.now = 0
        self.most = 0
        self.gate = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        if len(text) > LONG_CHARS:
            assert self.gate.wait(30)
        self.now -= 1
        return super().encode(text[:16])


def test_long_texts_go_one_at_a_time_and_keep_nobody_waiting() -> None:
    async def scene() -> None:
        tokenizer = Slow()
        long = [asyncio.ensure_future(encode(tokenizer, "a" * (LONG_CHARS + i))) for i in range(1, 5)]
        await asyncio.wait_for(encode(tokenizer, "b" * LONG_CHARS), 30)
        await encode(tokenizer, "c" * 100)
        assert not any(one.done() for one in long)
        tokenizer.gate.set()
        await asyncio.gather(*long)
        # One of each lane: the short one was through while a long one was held up.
        assert tokenizer.most <= 2

    asyncio.run(scene())


def test_a_prompt_is_tokenised_once_for_all_its_answers() -> None:
    tokenizer = Slow()

    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        requests = [GenerateRequest(prompt="the same text", rid=f"r{i}") for i in range(8)]
        answers = await submitted(client, wire, *requests)
        assert tokenizer.calls == 1
        await answers.aclose()

    play(scene, tokenizer)


# ---- 4. stop strings ------------------------------------------------------------------------------------------------

STOPS = tuple("a" * 1022 + chr(97 + i % 26) + chr(65 + i // 26) for i in range(64))


def test_stops_are_compiled_once_and_shared() -> None:
    compiled.cache_clear()
    tracemalloc.start()
    try:
        requests = [one.prepared for one in (Prepared(stop=STOPS) for _ in range(256))]
        states = [OutputState(one, FakeTokenizer()) for one in requests]
        for state in states:
            state.push(TokenOutput(rid="r", token_ids=[97, 97, 97]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert compiled.cache_info().misses == 1
    # Tables of 4 bytes a character, once: 256 KiB. Before, 256 times half a megabyte.
    assert peak < 4 * 2**20


class Prepared:
    def __init__(self, **sampling: Any) -> None:
        from pegboard.core.interfaces.messages import TokenizedRequest

        self.prepared = TokenizedRequest(rid="r", prompt=b"\1\0\0\0", sampling=SamplingParams(**sampling))
        if self.prepared.sampling.stop_regex:
            self.prepared.features["stop_expressions"] = encoded(True)


@pytest.mark.parametrize(
    ("answers", "sampling"),
    [
        (1024, {"stop": STOPS}),
        (64, {"stop_regex": tuple(f"[ab]{{60}}{i}" for i in range(16))}),
    ],
    ids=["strings", "expressions"],
)
def test_answers_times_stops_are_bounded(answers: int, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=4, **sampling)
    refused(400, "request_too_costly", *(GenerateRequest(prompt="Hi", sampling=params) for _ in range(answers)))


# ---- 6. log-probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answers", "tokens", "wanted"),
    [
        (64, 165, {"logprobs": 128, "token_ids_logprob": tuple(range(4)) * 1024}),
        (1, 1_000, {"logprobs": 0, "token_ids_logprob": tuple(range(4)) * 1024}),
        (128, 1, {"logprobs": 128, "logprob_start": 0}),
    ],
    ids=["the message that was dropped", "ids", "of prompts"],
)
def test_tokens_times_entries_are_bounded(answers: int, tokens: int, wanted: dict[str, Any], stream: bool) -> None:
    sampling = SamplingParams(max_new_tokens=tokens)
    one = GenerateRequest(prompt="a" * 100, sampling=sampling, stream=stream, **wanted)
    refused(400, "request_too_costly", *[one] * answers)


def test_an_open_length_is_cut_to_what_log_probabilities_may_cost() -> None:
    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        asked = GenerateRequest(prompt="Hi", rid="r", logprobs=20, sampling=SamplingParams(max_new_tokens=None))
        answers = await submitted(client, wire, asked)
        left = 2**20 + FREE_BYTES - REQUEST_BYTES - 2 * PROMPT_BYTES
        assert wire.sent[0].sampling.max_new_tokens == left // (21 * ENTRY_BYTES)
        await answers.aclose()

    play(scene, limits=BudgetLimits(request_bytes=2**20))


def test_costly_requests_share_a_budget_and_ordinary_ones_need_none() -> None:
    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        costly = GenerateRequest(prompt="Hi", logprobs=20, sampling=SamplingParams(max_new_tokens=300))
        bills = [Bill(), Bill()]
        for bill in bills:
            BILL.set(bill)
            await submitted(client, wire, costly)
        BILL.set(Bill())
        with pytest.raises(InvalidRequest, match="other requests") as caught:
            await client.submit_all([costly])
        assert (caught.value.status, caught.value.code) == (503, "over_budget")
        for _ in range(50):
            await submitted(client, wire, GenerateRequest(prompt="Hi", logprobs=0))
        assert client.budget.bytes > 2**20
        bills[0].settle()
        await submitted(client, wire, costly)
        BILL.get().settle()  # type: ignore[union-attr]
        bills[1].settle()
        assert (client.budget.bytes, client.budget.steps) == (0, 0)

    play(scene, limits=BudgetLimits(total_bytes=4 * 2**20))
