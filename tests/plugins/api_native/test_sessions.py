"""Sessions over HTTP, on a scripted engine. What turns are is tested with the store."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from pegboard.conformance.asgi import PATIENCE, Exchange
from pegboard.conformance.fake_client import SCRIPT
from pegboard.core.interfaces.client import AnnotatedPrompt
from pegboard.plugins.sessions_in_memory.api import NoSessions, SessionParams
from pegboard.toolkit.http.keys import Keys
from tests.plugins.api_native.asking import Server, played

ANSWER = "".join(SCRIPT)


def seen(server: Server) -> str:
    """The last prompt that reached the engine."""
    prompt = server.client.requests[-1].prompt
    assert not isinstance(prompt, AnnotatedPrompt)
    return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))


def test_open_append_branch_close() -> None:
    async def scene(server: Server) -> None:
        name = await server.told("/open_session", {"capacity_of_str_len": 1000})
        assert isinstance(name, str)
        first = await server.generate(text="Hi. ", session_params={"id": name}, rid="one")
        assert first["meta_info"]["prompt_tokens"] == 4
        second = await server.generate(text=" Go on.", session_params={"id": name})
        assert seen(server) == f"Hi. {ANSWER} Go on."
        assert second["meta_info"]["prompt_tokens"] == len(seen(server))
        await server.generate(input_ids=[33], session_params={"id": name, "rid": "one", "drop_previous_output": True})
        assert seen(server) == "Hi. !"
        await server.generate(text="?", session_params={"id": name, "rid": second["meta_info"]["id"], "offset": -1})
        assert seen(server) == f"Hi. {ANSWER} Go on.{ANSWER[:-1]}?"
        assert await server.told("/close_session", {"session_id": name}) == {"success": True}
        done = await server.post("/generate", {"text": "a", "session_params": {"id": name}})
        assert (done.status, done.json()["error"]["code"]) == (404, "session_not_found")
        assert done.json()["error"]["param"] == "session_params.id"

    played(scene)


def test_streams_are_turns_too() -> None:
    async def scene(server: Server) -> None:
        await server.told("/open_session", {"session_id": "s"})
        done = await server.post("/generate", {"text": "Hi", "stream": True, "session_params": {"id": "s"}})
        assert json.loads(done.events()[-2])["text"] == ANSWER
        await server.generate(text="!", session_params={"id": "s"})
        assert seen(server) == f"Hi{ANSWER}!"

    played(scene)


def test_36475_a_client_that_leaves_leaves_the_session_as_it_was() -> None:
    """In the middle of a stream, and while a whole answer is generated; the next turn comes at once."""

    async def leave(server: Server, *, stream: bool) -> None:
        server.client.stall_at = 1
        asked = len(server.client.requests)
        body = {"text": "lost", "stream": stream, "session_params": {"id": "s"}}
        exchange = server.begin("/generate", json.dumps(body).encode())
        while len(server.client.requests) == asked:
            await asyncio.sleep(0)
        if stream:
            await exchange.until(lambda one: SCRIPT[0].encode() in one.body)
        exchange.leave()
        await exchange.end()
        server.client.stall_at = None

    async def scene(server: Server) -> None:
        await server.told("/open_session", {"session_id": "s"})
        await server.generate(text="Hi. ", session_params={"id": "s"})
        for stream in (True, False):
            await leave(server, stream=stream)
            assert len(server.client.aborted) == 1 + (not stream)
            answer = await server.generate(text="?", session_params={"id": "s", "offset": -len(ANSWER)})
            assert seen(server) == "Hi. ?"
            assert answer["meta_info"]["prompt_tokens"] == 5
            await server.generate(text="Hi. ", session_params={"id": "s", "replace": True})

    played(scene)


def test_a_running_turn_keeps_others_out() -> None:
    async def scene(server: Server) -> None:
        await server.told("/open_session", {"session_id": "s"})
        server.client.stall_at = 1
        running = server.begin("/generate", b'{"text": "a", "rid": "r", "session_params": {"id": "s"}}')
        await asyncio.wait_for(server.client.submitted.wait(), PATIENCE)
        for params in ({"id": "s"}, {"id": "s", "rid": "r"}, {"id": "s", "replace": True}):
            done = await server.post("/generate", {"text": "b", "session_params": params})
            assert (done.status, done.json()["error"]["code"]) == (409, "session_busy")
        server.client.release.set()
        assert (await running.end()).status == 200
        server.client.stall_at = None
        await server.generate(text="b", session_params={"id": "s"})
        assert seen(server) == f"a{ANSWER}b"

    played(scene)


def test_a_key_leaves_sessions_to_others() -> None:
    async def scene() -> None:
        app = Server.of(keys=Keys(["alice", "bob"])).app
        asked = ["alice"] * 4 + ["bob"] * 2
        told = [(await Exchange(app, "POST", "/open_session", b"{}", key=key).end()).status for key in asked]
        assert told == [200, 200, 200, 429, 200, 429]

    asyncio.run(scene())


def test_limits() -> None:
    async def scene(server: Server) -> None:
        for name in "abc":
            assert await server.told("/open_session", {"session_id": name}) == name
        assert (await server.refused("/open_session", {}))[0] == 429
        assert await server.refused("/close_session", {"session_id": "d"}) == (404, "session_id")
        await server.told("/close_session", {"session_id": "a"})
        await server.told("/open_session", {"session_id": "a", "capacity_of_str_len": 10})
        assert await server.refused("/open_session", {"session_id": "b"}) == (409, "session_id")
        body = {"text": "x" * 11, "session_params": {"id": "a"}}
        assert await server.refused("/generate", body) == (400, "session_params.id")
        body = {"text": "x" * 201, "session_params": {"id": "b"}}
        assert await server.refused("/generate", body) == (400, "session_params.id")
        done: Exchange = await server.get("/server_info")
        assert done.json()["sessions"] == {"open": 3, "busy": 0, "tokens": 0}

    played(scene)


def test_logprobs_are_of_the_whole_prompt() -> None:
    async def scene(server: Server) -> None:
        await server.told("/open_session", {"session_id": "s"})
        await server.generate(text="ab", session_params={"id": "s"})
        length = len(f"ab{ANSWER}cd")
        body = {"text": "cd", "session_params": {"id": "s"}, "return_logprob": True, "logprob_start_len": length - 2}
        answer = await server.generate(**body)
        assert [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]] == [ord("c"), ord("d")]

    played(scene)


def test_the_page_about_them_is_right() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sessions.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(table) == sorted(SessionParams.model_fields)
    commands = re.findall(r"^\$ curl -s localhost:30000(/\w+) -d '(.*)'$", page, re.MULTILINE)
    assert [path for path, _ in commands] == ["/open_session", "/generate", "/generate", "/close_session"]

    async def scene(server: Server) -> None:
        name = ""
        for path, body in commands:
            answer = await server.told(path, json.loads(body.replace("5d0c…", name)))
            name = answer if isinstance(answer, str) else name
        assert seen(server).startswith("The capital of France is")
        assert seen(server).endswith(f"{ANSWER} And of Spain?")

    played(scene)


def test_a_server_without_sessions_says_so() -> None:
    async def scene(server: Server) -> None:
        assert await server.refused("/open_session", {}) == (400, "session_id")
        assert await server.refused("/generate", {"text": "a", "session_params": {"id": "s"}}) == (
            400,
            "session_params",
        )
        await server.generate(text="a", session_params={})

    played(scene, services={"session_store": NoSessions()})
