"""The store of /v1/responses: what it counts, what it forgets first, and who finds what in it."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.responses.replay import Tape
from pegboard.plugins.api_openai.responses.store import Item, ResponseStore
from pegboard.plugins.api_openai.router import OpenAIRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.value_size import memory_of
from tests.plugins.api_openai.asking import make_app
from tests.plugins.api_openai.test_responses import PATH, told
from tests.plugins.api_openai.test_responses_kept import ROOM, reference, refused


def _answer(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "type": "message", "content": text}]}


def test_the_store_counts_what_answers_share_once() -> None:
    store = ResponseStore(1000, ROOM).of("")
    store.put(_answer(0), [], [Item({"role": "user", "content": "x" * 50_000})], Tape())
    alone = store.bytes
    for number in range(1, 20):
        before = store.get(f"resp_{number - 1}")
        assert before is not None
        store.put(_answer(number), before.items, [Item({"role": "user", "content": "y"})], Tape())
        store.drop(f"resp_{number - 1}")
    assert alone < store.bytes < alone + 20 * 2000, "what the last one has is counted, though its origin is gone"
    assert store.item("msg_0") is not None
    store.drop("resp_19")
    assert (store.bytes, store._items, len(store)) == (0, {}, 0)


def test_the_store_stays_within_its_bytes() -> None:
    store = ResponseStore(1000, 15_000).of("")
    for number in range(50):
        store.put(_answer(number, "z" * 1000), [], [Item({"role": "user", "content": "x" * 1000})], Tape())
        assert store.bytes <= 15_000
    assert 3 <= len(store) <= 5
    assert len(store._items) == 2 * len(store)
    kept = store.item("msg_49")
    assert kept is not None
    assert store.item("msg_0") is None
    # An item that outlives its answer, in the hands of a request, is kept again with the answer to that.
    store.drop("resp_49")
    store.put(_answer(50), [], [kept], Tape())
    assert store.item("msg_49") is kept


def test_the_store_counts_what_its_values_take_in_memory() -> None:
    """Some JSON takes many times its bytes; so do the log-probabilities of answers."""
    entry = {
        "token": " is",
        "logprob": -0.5,
        "bytes": [32, 105, 115],
        "top_logprobs": [{"token": "x", "logprob": -1.5}],
    }
    part = {"type": "output_text", "text": "is", "logprobs": [{**entry} for _ in range(2000)]}
    for odd in ([{} for _ in range(20_000)], [[] for _ in range(20_000)], ["ab"] * 20_000, [part], "é😀" * 20_000):  # type: ignore[var-annotated]
        store = ResponseStore(1000, 10**9)
        value = json.loads(json.dumps({"role": "user", "content": "x", "more": odd}))
        store.of("").put(_answer(0), [], [Item(value)], Tape())
        assert memory_of(value) < store.bytes < 6 * memory_of(value)


@pytest.mark.parametrize("name", ["content", "output"])
@pytest.mark.parametrize("wrap", [lambda url: {"image_url": url}, lambda url: {"video_url": {"url": url}}])
def test_pictures_are_counted_and_not_looked_through(name: str, wrap: Callable[[str], dict[str, Any]]) -> None:
    """They take what their addresses take, and what goes through memory does not grow with them."""
    size = 2**23
    url = "data:;base64," + "A" * size
    for more in ({}, {"odd": "é😀" * 1000}, {"odd": ["x"] * 2000}):
        value = {"role": "user", name: [{"text": "x"}, {**wrap(url), **more}, more, wrap("data:,short")]}
        store = ResponseStore(1000, 10**9)
        tracemalloc.start()
        item = Item(value)
        store.of("").put(_answer(0), [], [item], Tape())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert memory_of(value) < store.bytes < size + 6 * (memory_of(value) - size)
        assert abs(item.size - len(json.dumps(value, ensure_ascii=False).encode())) < 50_000
        assert item.value[name] == value[name]
        assert peak < size / 8


def test_an_item_outlives_the_answer_that_brought_it_in_its_copies() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient(script=("Yes.",)), options={"stored_responses": 3})
        first = await told(app)
        item = first["output"][0]
        hi = {"role": "user", "content": "Hi"}
        for _ in range(2):
            # Clients that send the whole conversation send the item itself.
            await told(app, input=[hi, item, hi])
        await told(app, input=[reference(item), hi])
        for _ in range(2):
            await call(app, "DELETE", f"{PATH}/{first['id']}")
            await told(app, input=[reference(item), hi])
        await told(app)
        await told(app)
        await told(app)
        await refused(app, 404, input=[reference(item), hi])

    asyncio.run(scene())


KEYS = Keys(["mine", "other"], ["admin"])


def test_a_key_has_its_own_responses() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=1)
        ctx = ApiContext(client=client, max_body_bytes=ROOM)
        options = OpenAIOptions(stored_responses=4)  # type: ignore[call-arg]
        app = build_app([("openai", OpenAIRouter(options, ctx))], keys=KEYS)

        async def ask(key: str, method: str, path: str = "", **body: Any) -> tuple[int, Any]:
            done = Exchange(app, method, PATH + path, json.dumps(body).encode() if body else b"", key=key)
            await done.end()
            return done.status or 0, done.json()

        running = asyncio.create_task(ask("mine", "POST", input="Hi"))
        await client.submitted.wait()
        one = f"/{client.requests[0].rid}"
        while (await ask("mine", "GET", one))[0] != 200:
            await asyncio.sleep(0)
        routes = [("GET", one), ("GET", f"{one}?stream=true"), ("GET", f"{one}/input_items"), ("DELETE", one)]
        for key in ("other", "admin"):
            for method, path in (*routes, ("POST", f"{one}/cancel")):
                assert (await ask(key, method, path))[0] == 404, (method, path)
        client.release.set()
        status, response = await running
        assert (status, response["status"]) == (200, "completed")
        for method, path in (*routes, ("POST", f"{one}/cancel")):
            assert (await ask("other", method, path))[0] == 404, (method, path)
        assert (await ask("other", "POST", input="So?", previous_response_id=response["id"]))[0] == 400
        assert (await ask("other", "POST", input=[reference(response["output"][0])]))[0] == 404
        # Another's many answers do not drive out the one of this key.
        for _ in range(6):
            assert (await ask("other", "POST", input="Hi"))[0] == 200
        assert (await ask("mine", "POST", input="So?", previous_response_id=response["id"]))[0] == 200
        assert (await ask("mine", "DELETE", one))[0] == 200

    asyncio.run(scene())
