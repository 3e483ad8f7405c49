"""Streams of answers: what is written straight to a connection is what the ordinary way sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from docs._build.config import builtin_registry
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.client import GenerateRequest, OutputChunk
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    TokenOutput,
    TokenOutputs,
)
from pegboard.core.registry.hooks import Hooks
from pegboard.core.server.client import AsyncEngineClient
from pegboard.core.server.serve import build_api
from pegboard.toolkit.http.answer_stream import BODY_WRITER, AnswerStream, AnswerWriter, body_writer
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.events import event
from pegboard.toolkit.http.generation import Answers

Step = list[tuple[int, str]]
"""What one message of the scheduler brings: (request, new tokens as text); "." ends it, "!" fails it."""

FAILED = {"type": "abort", "status": 500, "message": "the model failed"}


class Script(AnswerWriter):
    """Writes every chunk with what is known so far, and raises where it is told to."""

    def __init__(self, answers: Answers, raises: str = "") -> None:
        self.answers, self.raises = answers, raises

    def begin(self) -> bytes:
        return event("begin")

    def more(self, index: int, chunk: OutputChunk) -> bytes:
        if self.raises and self.raises in chunk.text:
            raise ValueError("a secret")
        return event([index, chunk.text, self.answers.answers[index].text, chunk.finish_reason]) if chunk.text else b""

    def end(self) -> bytes:
        return event("end")


class Connection:
    """The server's side: an ASGI `send` and `receive`, and a body writer that takes so many pieces at a time."""

    def __init__(self, room: int = 10**9) -> None:
        self.room, self.body, self.pieces = room, b"", 0
        self.complete = self.gone = False
        self.direct = 0
        self._more, self._left = asyncio.Event(), asyncio.Event()

    def write(self, data: bytes) -> bool:
        assert data, "an empty piece is the end of a chunked body"
        assert not self.complete
        self.body += data
        self.pieces += 1
        self.direct += 1
        return self.pieces < self.room

    async def drain(self) -> None:
        await self._more.wait()

    def take(self) -> None:
        """The client reads again."""
        self.pieces = 0
        self._more.set()

    def leave(self) -> None:
        self.gone = True
        self._left.set()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and not self.gone:
            self.body += message["body"]
            self.complete = not message.get("more_body", False)

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    def scope(self, *, direct: bool = True, foreign: type[Looking] | None = None) -> Any:
        app = build_app([])
        if foreign is not None:
            app.add_middleware(foreign)
        return {"type": "http", "app": app, "extensions": {BODY_WRITER: self} if direct else {}}


class Stage:
    """A client whose scheduler is the test, with accepted requests."""

    def __init__(self) -> None:
        self.client = AsyncEngineClient(FakeEngineClient().info, FakeTokenizer())
        self.sent: list[Any] = []
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.client.attach(self, FakeEngineClient().info)  # type: ignore[arg-type]

    def send(self, messages: Any) -> None:
        self.sent += messages

    async def receive(self) -> Any:
        return await self._incoming.get()

    async def say(self, *messages: Any) -> None:
        self._incoming.put_nowait(list(messages))
        await settle()

    async def answers(self, count: int, **more: Any) -> Answers:
        requests = [GenerateRequest(prompt="Hi", rid=f"r{i}", stream=True, **more) for i in range(count)]
        task = asyncio.ensure_future(Answers.submit(self.client, requests))
        await settle()
        await self.say(*[Accepted(rid=one.rid) for one in requests])
        return await task

    async def play(self, step: Step) -> None:
        outputs = [
            TokenOutput(
                rid=f"r{index}",
                token_ids=[ord(one) for one in text.rstrip("!")],
                finish_reason=FAILED if text.endswith("!") else {"type": "length"} if text.endswith(".") else None,
            )
            for index, text in step
        ]
        await self.say(TokenOutputs(outputs=outputs))

    @property
    def aborted(self) -> set[str]:
        return {one.rid for one in self.sent if isinstance(one, AbortRequest)}


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(asyncio.ensure_future(scene()), 30)

    asyncio.run(whole())


def told(body: bytes) -> list[Any]:
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(one.removeprefix("data: ")) for one in lines[:-2]]


def texts(body: bytes) -> dict[int, str]:
    """Per request, the text of its chunks together, which each of them has agreed with so far."""
    found: dict[int, str] = {}
    for one in told(body):
        if isinstance(one, list):
            found[one[0]] = found.get(one[0], "") + one[1]
            assert found[one[0]] == one[2]
    return found


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[Step]]:
    """Steps that end every request, some by failing it."""
    count = draw(st.integers(1, 4))
    letters = st.text("ab漢🙂", min_size=1, max_size=3)
    steps: list[Step] = [
        [(index, text) for index in range(count) if (text := draw(st.none() | letters)) is not None]
        for _ in range(draw(st.integers(0, 6)))
    ]
    ends = draw(st.lists(st.sampled_from(["x.", ".", "y!", "z.", "."]), min_size=count, max_size=count))
    for index, end in enumerate(ends):
        at = draw(st.integers(0, len(steps)))
        for step in steps[at:]:
            step[:] = [one for one in step if one[0] != index]
        steps.insert(at, [(index, end)])
    return count, [step for step in steps if step]


async def stream(
    script: tuple[int, Sequence[Step]], connection: Connection, scope: Any, *, raises: str = "", lag: int = 0
) -> tuple[bytes, set[str]]:
    """What a client gets, and who was aborted. With a `lag`, the client reads only after every so many steps."""
    stage = Stage()
    answers = await stage.answers(script[0])
    response = AnswerStream(answers, Script(answers, raises))
    serving = asyncio.ensure_future(response(scope, connection.receive, connection.send))
    await settle()
    for number, step in enumerate(script[1], 1):
        await stage.play(step)
        if lag and number % lag == 0:
            connection.take()
            await settle()
    for _ in range(3):
        connection.take()
        await settle()
    await asyncio.wait_for(serving, 10)
    stage.client.detach("over")
    assert connection.complete
    return connection.body, stage.aborted


@settings(deadline=None, max_examples=60)
@given(script=scripts())
def test_both_ways_say_the_same(script: tuple[int, list[Step]]) -> None:
    async def scene() -> None:
        straight, plain = Connection(), Connection()
        first, aborted = await stream(script, straight, straight.scope())
        second, aborted_too = await stream(script, plain, plain.scope(direct=False))
        assert straight.direct >= 1
        assert plain.direct == 0
        assert aborted == aborted_too
        if any(text.endswith("!") for step in script[1] for _, text in step):
            # Which of two requests is heard last before a third one fails is nobody's promise.
            assert told(first)[-1] == told(second)[-1]
            return
        assert texts(first) == texts(second)
        assert told(first)[0] == told(second)[0] == "begin"
        assert told(first)[-1] == told(second)[-1] == "end"
        if script[0] == 1:
            assert first == second

    run(scene)


@settings(deadline=None, max_examples=40)
@given(script=scripts(), room=st.integers(1, 3), lag=st.integers(1, 4))
def test_slow_clients_get_everything_in_fewer_pieces(script: tuple[int, list[Step]], room: int, lag: int) -> None:
    async def scene() -> None:
        fast, slow = Connection(), Connection(room)
        first, _ = await stream(script, fast, fast.scope())
        second, _ = await stream(script, slow, slow.scope(), lag=lag)
        assert slow.direct <= fast.direct
        assert told(first)[-1] == told(second)[-1]
        if told(first)[-1] == "end":
            assert texts(first) == texts(second)

    run(scene)


def test_what_comes_at_one_time_is_one_piece() -> None:
    async def scene() -> None:
        connection = Connection()
        stage = Stage()
        answers = await stage.answers(3)
        serving = asyncio.ensure_future(
            AnswerStream(answers, Script(answers))(connection.scope(), connection.receive, connection.send)
        )
        await settle()
        before = connection.direct
        await stage.play([(0, "a"), (1, "b"), (2, "c")])
        assert connection.direct == before + 1
        connection.leave()
        await serving
        stage.client.detach("over")

    run(scene)


def test_a_writer_that_raises_ends_the_stream() -> None:
    async def scene() -> None:
        connection = Connection()
        body, aborted = await stream((2, [[(0, "a")], [(1, "bad")], [(0, "z.")]]), connection, connection.scope(),
                                     raises="bad")  # fmt: skip
        assert told(body)[:2] == ["begin", [0, "a", "a", None]]
        assert told(body)[2]["error"]["message"] == "internal error"
        assert len(told(body)) == 3
        assert aborted == {"r0", "r1"}

    run(scene)


@pytest.mark.parametrize("count", [1, 2])
def test_who_leaves_is_aborted(count: int) -> None:
    async def scene() -> None:
        stage, connection = Stage(), Connection()
        answers = await stage.answers(count)
        response = AnswerStream(answers, Script(answers))
        serving = asyncio.ensure_future(response(connection.scope(), connection.receive, connection.send))
        await settle()
        await stage.play([(0, "a")])
        connection.leave()
        await serving
        await settle()
        assert stage.aborted == {f"r{i}" for i in range(count)}
        written = connection.direct
        await stage.play([(0, "b")])
        assert connection.direct == written
        stage.client.detach("over")

    run(scene)


def test_who_leaves_while_nothing_can_be_written_is_aborted() -> None:
    async def scene() -> None:
        stage, connection = Stage(), Connection(room=1)
        answers = await stage.answers(1)
        response = AnswerStream(answers, Script(answers))
        serving = asyncio.ensure_future(response(connection.scope(), connection.receive, connection.send))
        await settle()
        await stage.play([(0, "a")])
        connection.leave()
        await serving
        await settle()
        assert stage.aborted == {"r0"}
        assert len(asyncio.all_tasks()) == 3, "somebody still waits for the connection"
        stage.client.detach("over")

    run(scene)


@pytest.mark.parametrize("room", [2, 10**9])
def test_a_failure_with_the_last_token_is_told(room: int) -> None:
    """Both are there when the stream looks, because the client was slow, or because they came in one go."""

    async def scene() -> None:
        stage, connection = Stage(), Connection(room)
        answers = await stage.answers(1)
        response = AnswerStream(answers, Script(answers))
        serving = asyncio.ensure_future(response(connection.scope(), connection.receive, connection.send))
        await settle()
        await stage.play([(0, "a")])
        token = TokenOutput(rid="r0", token_ids=[ord("b")], finish_reason=None)
        failure = TokenOutput(rid="r0", token_ids=[], finish_reason=FAILED)
        await stage.say(TokenOutputs(outputs=[token]), TokenOutputs(outputs=[failure]))
        connection.take()
        await settle()
        await asyncio.wait_for(serving, 5)
        assert texts(connection.body)[0] == "ab"
        assert told(connection.body)[-1]["error"]["message"] == "the model failed"
        stage.client.detach("over")

    run(scene)


def test_a_dead_engine_is_told() -> None:
    async def scene() -> None:
        stage, connection = Stage(), Connection()
        answers = await stage.answers(1)
        response = AnswerStream(answers, Script(answers))
        serving = asyncio.ensure_future(response(connection.scope(), connection.receive, connection.send))
        await settle()
        stage.client.detach("the engine is gone")
        await serving
        assert told(connection.body)[-1]["error"]["message"] == "the engine is gone"

    run(scene)


def test_errors_are_the_apis() -> None:
    async def scene() -> None:
        stage, connection = Stage(), Connection()
        answers = await stage.answers(1)

        def broken(error: InvalidRequest) -> bytes:
            raise RuntimeError("the error writer fails too")

        response = AnswerStream(answers, Script(answers), error=broken, done=b"")
        serving = asyncio.ensure_future(response(connection.scope(), connection.receive, connection.send))
        await settle()
        await stage.play([(0, "a!")])
        with pytest.raises(RuntimeError, match="fails too"):
            await serving
        # Others are served as before.
        more = asyncio.ensure_future(stage.client.submit(GenerateRequest(prompt="Hi", rid="r7")))
        await settle()
        await stage.say(Accepted(rid="r7"))
        assert (await more).rid == "r7"
        stage.client.detach("over")

    run(scene)


class Looking:
    """A middleware that may want to see bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class PassingOn(Looking):
    """One that says that it does not."""

    passes_bodies = True


@pytest.mark.parametrize("foreign", [Looking, PassingOn])
def test_middleware_sees_what_passes_it(foreign: type[Looking]) -> None:
    async def scene() -> None:
        connection = Connection()
        body, _ = await stream((1, [[(0, "a")], [(0, "z.")]]), connection, connection.scope(foreign=foreign))
        assert (connection.direct > 0) == (foreign is PassingOn)
        assert texts(body) == {0: "az."}

    run(scene)


@pytest.mark.parametrize("server", [{}, {"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}])
def test_our_own_middleware_lets_streams_write_to_the_connection(server: dict[str, str]) -> None:
    """That of all APIs of the default config, and of all hooks."""

    async def scene() -> None:
        registry = builtin_registry()
        resolved = compose(data={"model": {"path": "x/y"}, "server": server}, env={}, registry=registry)
        hooks = Hooks.load(resolved.registry, resolved.plugin_options)
        hooks.call.configure(config=resolved.engine, origins=resolved.origins)
        client = FakeEngineClient()
        app = build_api(resolved, client, hooks)[0]
        before = len(app.user_middleware)
        hooks.call.register_routes(app=app, client=client)
        assert len(app.user_middleware) == before + 1 + len(server)
        connection = Connection()
        assert body_writer({"app": app, "extensions": {BODY_WRITER: connection}}) is connection
        hooks.call.shutdown()

    run(scene)


def test_an_answer_that_was_begun_is_written_from_its_beginning() -> None:
    """As those with grammars are, whose first output decides whether there is a stream."""

    async def scene() -> None:
        for count in (1, 2):
            stage, connection = Stage(), Connection()
            answers = await stage.answers(count)
            beginning = asyncio.ensure_future(answers.begin())
            await settle()
            await stage.play([(index, "a") for index in range(count)])
            await beginning
            response = AnswerStream(answers, Script(answers))
            serving = asyncio.ensure_future(response(connection.scope(), connection.receive, connection.send))
            await settle()
            await stage.play([(index, "b") for index in range(count)])
            await stage.play([(index, "c.") for index in range(count)])
            await serving
            assert texts(connection.body) == dict.fromkeys(range(count), "abc.")
            stage.client.detach("over")

    run(scene)
