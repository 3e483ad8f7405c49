"""What is kept of /v1/responses: items that others refer to, inputs, and streams that are told again."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import ResponseItemList
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient
from pegboard.plugins.api_openai.responses import replay
from pegboard.plugins.api_openai.responses.output import Output
from pegboard.toolkit.chat.tool_calls import ChatStream
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.parsing.output_parser import Content, OutputEvent
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai.asking import make_app, post
from tests.plugins.api_openai.test_responses import CALLS, EVENT, PATH, TOOL, frames, prompt_of, told

ROOM = 10**6


def reference(item: Any, **more: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"], **more}


async def refused(app: Any, status: int, **body: Any) -> dict[str, Any]:
    done = await call(app, "POST", PATH, body)
    assert done.status == status, done.body
    error: dict[str, Any] = done.json()["error"]
    return error


# ---- references --------------------------------------------------------------------------------------------------


def test_references_stand_for_items() -> None:
    async def scene() -> None:
        client = FakeEngineClient(script=CALLS)
        app = make_app(client, **fake_parsers())
        thinking, message, sum_call, other = (await told(app, tools=[TOOL]))["output"]
        # The forms that clients send: with a type, with null, and with none.
        items = [
            {"role": "user", "content": "Hi"},
            reference(thinking),
            {"id": message["id"]},
            reference(sum_call, type=None),
            reference(other),
            {"type": "function_call_output", "call_id": sum_call["call_id"], "output": "3"},
        ]
        answer = await told(app, input=items, tools=[TOOL])
        refers = prompt_of(client)
        whole = [{"role": "user", "content": "Hi"}, thinking, message, sum_call, other, items[-1]]
        await told(app, input=whole, tools=[TOOL])
        assert refers == prompt_of(client)
        assert "Well" in refers
        assert refers.endswith("tool: 3\nassistant:")
        # A response that follows on has what its predecessor referred to.
        await told(app, input="And?", previous_response_id=answer["id"])
        assert prompt_of(client).startswith(refers)

    asyncio.run(scene())


def test_items_of_inputs_can_be_referred_to() -> None:
    async def scene() -> None:
        client = FakeEngineClient(script=("Yes.",))
        app = make_app(client)
        answer = await told(app, input=[{"role": "user", "content": "Sure?", "id": "guess"}])
        (item,) = (await call(app, "GET", f"{PATH}/{answer['id']}/input_items")).json()["data"]
        await told(app, input=[reference(item), {"role": "user", "content": "Really?"}])
        assert prompt_of(client) == "user: Sure?\nuser: Really?\nassistant:"
        assert item["id"] != "guess", "an id that a client made up could be another's guess"
        await refused(app, 404, input=[{"type": "item_reference", "id": "guess"}])

    asyncio.run(scene())


def test_what_is_not_kept_cannot_be_referred_to() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient())
        hi = {"role": "user", "content": "Hi"}
        kept, fleeting = await told(app), await told(app, store=False)
        for item in (fleeting["output"][0], {"id": "msg_1"}):
            error = await refused(app, 404, input=[hi, reference(item)])
            assert error["message"].startswith(f"Item with id '{item['id']}' not found.")
            assert (error["param"], error["code"]) == ("input.1.id", "item_not_found")
        for odd in (5, "", None, [], {}):  # type: ignore[var-annotated]
            error = await refused(app, 400, input=[{"type": "item_reference", "id": odd}])
            assert error["param"] == "input.0.id"
        item = kept["output"][0]
        error = await refused(app, 400, input=[reference(item), hi, reference(item)])
        assert error["param"] == "input.2.id", "a small body stands for no more than what is kept"
        await refused(app, 400, input=[reference(item)], previous_response_id=kept["id"])
        following = await told(app, input=[reference(item), hi])
        await call(app, "DELETE", f"{PATH}/{kept['id']}")
        # The one that follows has it.
        await told(app, input=[reference(item), hi], store=False)
        await call(app, "DELETE", f"{PATH}/{following['id']}")
        await refused(app, 404, input=[reference(item), hi])

    asyncio.run(scene())


def test_dropped_items_are_not_found() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(), options={"stored_responses": 2})
        first, second = [(await told(app))["output"][0] for _ in range(2)]
        await told(app, input=[reference(first)], store=False)
        await told(app)
        await told(app, input=[reference(first)], store=False)
        await refused(app, 404, input=[reference(second)])

    asyncio.run(scene())


def test_references_say_no_more_than_a_body_could() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(script=("x" * ROOM,)))
        first, second = [(await told(app))["output"][0] for _ in range(2)]
        error = await refused(app, 413, input=[reference(first), reference(second)])
        assert (error["param"], error["code"]) == ("input", "body_too_large")

    asyncio.run(scene())


def test_a_stream_that_says_it_is_over_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        app, tidying, tidied = make_app(FakeEngineClient()), asyncio.Event(), asyncio.Event()

        async def slow(self: Answers) -> None:
            tidying.set()
            await tidied.wait()

        monkeypatch.setattr(Answers, "aclose", slow)
        first = Exchange(app, "POST", PATH, b'{"input": "Hi", "stream": true}')
        await first.until(lambda one: one.complete)
        last = frames(first)[-1]["response"]
        await tidying.wait()
        # Other requests come in between the last event and what the server does behind it.
        assert (await call(app, "GET", f"{PATH}/{last['id']}")).status == 200
        tidied.set()
        await first.end()

    asyncio.run(scene())


# ---- inputs ------------------------------------------------------------------------------------------------------


def test_inputs_are_listed() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(script=CALLS), **fake_parsers())
        first = await told(app, tools=[TOOL])
        said, found = first["output"][1:3]
        items = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "developer", "content": [{"type": "input_text", "text": "3"}]},
            said,
            reference(found),
            {"type": "function_call_output", "call_id": found["call_id"], "output": "4"},
        ]
        second = await told(app, input=items, previous_response_id="")
        path = f"{PATH}/{second['id']}/input_items"

        async def page(query: str = "") -> dict[str, Any]:
            done = await call(app, "GET", path + query)
            assert done.status == 200, done.body
            ResponseItemList.model_validate_json(done.body, strict=True)
            answer: dict[str, Any] = done.json()
            return answer

        whole = await page("?order=asc")
        assert [one["type"] for one in whole["data"]] == ["message"] * 4 + ["function_call", "function_call_output"]
        assert whole["data"][0]["content"] == [{"type": "input_text", "text": "1"}]
        assert whole["data"][3:5] == [said, found], "what came from here keeps its id"
        assert (whole["object"], whole["has_more"]) == ("list", False)
        assert (await page())["data"] == whole["data"][::-1]
        ids = [one["id"] for one in whole["data"]]
        assert (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
        some = await page(f"?order=asc&limit=2&after={ids[0]}")
        assert ([one["id"] for one in some["data"]], some["has_more"]) == (ids[1:3], True)
        assert [one["id"] for one in (await page(f"?after={ids[2]}&limit=2"))["data"]] == [ids[1], ids[0]]
        for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
            done = await call(app, "GET", f"{path}?{query}")
            assert (done.status, done.json()["error"]["param"]) == (400, param)
        assert (await call(app, "GET", f"{PATH}/resp_x/input_items")).status == 404

    asyncio.run(scene())


def test_tokens_of_inputs_are_counted() -> None:
    body = {"input": "Hi", "instructions": "Be brief", "tools": [TOOL]}
    answer, client = post(f"{PATH}/input_tokens", body, context=fake_parsers())
    InputTokenCountResponse.model_validate_json(json.dumps(answer), strict=True)
    assert client.requests == []
    usage = post(PATH, body, context=fake_parsers())[0]["usage"]
    assert answer == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_nothing_is_compacted() -> None:
    done = asyncio.run(call(make_app(FakeEngineClient()), "POST", f"{PATH}/compact", {"input": "Hi"}))
    assert (done.status, done.json()["error"]["type"]) == (404, "invalid_request_error")


def test_other_routes_are_no_ids() -> None:
    for name in ("input_tokens", "compact"):
        done = asyncio.run(call(make_app(FakeEngineClient()), "GET", f"{PATH}/{name}"))
        assert (done.status, done.headers["allow"]) == (405, "POST")
    assert asyncio.run(call(make_app(FakeEngineClient()), "GET", f"{PATH}/compacted")).status == 404


# ---- streams, once more ------------------------------------------------------------------------------------------

CUSTOM = {"type": "custom", "name": "run"}


@pytest.mark.parametrize(
    ("script", "body"),
    [
        (SCRIPT, {"top_logprobs": 1}),
        (CALLS, {"tools": [TOOL]}),
        (("",), {}),
        (('[[run|{"input": "a\\', 'nb"}]]'), {"tools": [CUSTOM]}),
    ],
)
def test_a_stream_is_told_again_as_it_was(script: tuple[str, ...], body: dict[str, Any]) -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(script=script), **(fake_parsers() if "tools" in body else {}))
        first = await call(app, "POST", PATH, {"input": "Hi", "stream": True, **body})
        events = frames(first)
        path = f"{PATH}/{events[0]['response']['id']}?stream=true"
        assert (await call(app, "GET", path)).body == first.body
        for after in (0, 3, len(events) - 2):
            again = await call(app, "GET", f"{path}&starting_after={after}")
            assert again.body == b"".join(part + b"\n\n" for part in first.body.split(b"\n\n")[after + 1 : -1])
        done = await call(app, "GET", f"{path}&starting_after={len(events) - 1}")
        assert (done.status, done.body) == (200, b"")

    asyncio.run(scene())


@pytest.mark.parametrize("ending", [{"fail_at": 1}, {"finish_reason": {"type": "length"}}])
def test_streams_that_ended_otherwise_are_told_again(ending: dict[str, Any]) -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(**ending))
        first = await call(app, "POST", PATH, {"input": "Hi", "stream": True})
        again = await call(app, "GET", f"{PATH}/{frames(first)[0]['response']['id']}?stream=true")
        assert again.body == first.body

    asyncio.run(scene())


class Piece(str):
    """A piece of text that is added to no other: that copies the other, and for each piece of a long answer anew."""

    def __radd__(self, other: str) -> str:
        raise AssertionError(f"{self!r} is added to {len(other)} characters")


class Cut(ChatStream):
    """Gives what it gets, as it came."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [Content(Piece(text))]


def test_a_long_answer_is_put_together_once() -> None:
    output, over = Output(Cut()), False
    words = [f"{number} " for number in range(100)]
    for word in words:
        output.feed(word)
    live = replay.replay({"status": "in_progress"}, output.items, output.tape, lambda: not over)
    events = list(itertools.islice(live, 4 + 50))
    output.finish(complete=True)
    over = True
    assert output.items[0]["content"][0]["text"] == "".join(words)
    events += [one for one in live if one and "delta" in one]
    assert [one["delta"] for one in events[4:] if one] == words, "who follows goes on, when it is over as before"


def test_whole_answers_are_told_as_streams() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(script=CALLS), **fake_parsers())
        answer = await told(app, tools=[TOOL])
        events = frames(await call(app, "GET", f"{PATH}/{answer['id']}?stream=true"))
        assert events[-1]["response"] == answer
        deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "Well "
        missing = await call(app, "GET", f"{PATH}/resp_x?stream=true")
        assert missing.status == 404

    asyncio.run(scene())


def test_a_stream_can_be_followed_while_it_comes() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=2)
        app = make_app(client)
        first = Exchange(app, "POST", PATH, b'{"input": "Hi", "stream": true}')
        await first.until(lambda one: SCRIPT[1].encode() in one.body)
        path = f"{PATH}/{client.requests[0].rid}"
        second = Exchange(app, "GET", f"{path}?stream=true")
        late = Exchange(app, "GET", f"{path}?stream=true&starting_after=4")
        for one in (second, late):
            await one.until(lambda one: SCRIPT[1].encode() in one.body)
        assert second.body == first.body
        assert (await call(app, "GET", f"{path}/input_items")).status == 400
        client.release.set()
        for one in (first, second, late):
            await one.end()
        assert second.body == first.body
        assert late.body == first.body[-len(late.body) :]
        assert SCRIPT[0].encode() not in late.body.split(b"\n\n")[0]

    asyncio.run(scene())


@pytest.mark.parametrize("stream", [True, False])
def test_who_follows_hears_that_the_client_has_left(stream: bool) -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=1)
        app = make_app(client)
        first = Exchange(app, "POST", PATH, json.dumps({"input": "Hi", "stream": stream}).encode())
        await client.submitted.wait()
        while (found := await call(app, "GET", f"{PATH}/{client.requests[0].rid}")).status != 200:
            await asyncio.sleep(0)
        second = Exchange(app, "GET", f"{PATH}/{found.json()['id']}?stream=true")
        await second.until(lambda one: one.status is not None)
        first.leave()
        for one in (first, second):
            await one.end()
        last = json.loads(second.body.strip().rpartition(b"data: ")[2])
        EVENT.validate_json(json.dumps(last), strict=True)
        assert (last["type"], last["code"]) == ("error", "response_lost")

    asyncio.run(scene())


def test_no_event_waits_for_the_next() -> None:
    async def scene() -> None:
        more = False

        def events() -> Iterator[dict[str, Any] | None]:
            yield {"type": "a"}
            while not more:
                yield None
            yield {"type": "b"}

        async def news() -> None:
            raise AssertionError("it is there already")

        written = replay.frames(events(), -1, news)
        assert b"event: a" in await anext(written)
        # It comes while the first is being sent.
        more = True
        assert b"event: b" in await anext(written)

    asyncio.run(scene())
