"""The conformance suite of ApiRouter.

It finds out by itself what a router offers: every POST route that documents an example of its body
(`pegboard.toolkit.http.openapi.body_docs`) is tried with it, and those that reach the engine count as generating.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.api_router.answers import AnswerTests
from pegboard.conformance.api_router.base import Sample
from pegboard.conformance.api_router.media import MediaTests
from pegboard.conformance.api_router.texts import Unreadable, mark, own_script
from pegboard.conformance.asgi import PATIENCE, Exchange, call, strings
from pegboard.conformance.fake_client import FAILURE, FakeEngineClient
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.levels import level_of

ODD = {
    "deep lists": b"[" * 150 + b"]" * 150,
    "deep objects": b'{"a":' * 150 + b"1" + b"}" * 150,
    "deeper": b"[" * 40_000 + b"]" * 40_000,
    "many digits": b"9" * 5000,
    "beyond floats": b"1e999",
    "below floats": b"-1e999",
    "beyond 64 bits": b"36893488147419103232",
    "half a character": rb'"\ud800"',
    "no character": rb'"\u0000"',
    "not a number": b"NaN",
    "infinity": b"Infinity",
    "long text": b'"' + b"x" * 90_000 + b'"',
    "many": b"[" + b"1," * 20_000 + b"1]",
    "twice": b'{"a": 1, "a": 2}',
}
"""JSON, more or less, that servers have stumbled over, by what it is."""


class ApiRouterContract(MediaTests, AnswerTests):
    """What every API owes its clients and the engine, whatever its format."""

    contract = "api"

    # ---- documentation --------------------------------------------------------------------------------------------

    def test_routes_exist_and_are_documented(self) -> None:
        routes = self.api_routes()
        assert routes, "no routes"
        silent = [route.path for route in routes if not (route.summary or "").strip()]
        assert not silent, f"routes without a summary: {silent}"

    def test_every_route_declares_who_may_use_it(self) -> None:
        silent = [
            f"{method} {route.path}"
            for route in self.api_routes()
            if level_of(route) is None
            for method in sorted(route.methods or ())
        ]
        assert not silent, f"routes that are neither PUBLIC, USER nor ADMIN of pegboard.toolkit.http.levels: {silent}"

    def test_keys_are_asked_for(self) -> None:
        """Whatever is not public answers 401 without a key, in this API's error format, and names a scheme."""

        async def scene(sample: Sample) -> tuple[Exchange, Exchange]:
            app = self.make_app(FakeEngineClient(), keys=Keys(user=["k"], admin=["a"]))
            return await call(app, "POST", sample.path, sample.body), await call(
                self.make_app(FakeEngineClient()), "POST", sample.path, b"{"
            )

        public = {route.path for route in self.api_routes() if level_of(route) == "public"}
        for sample in self.samples():
            if sample.path not in public:
                done, malformed = asyncio.run(scene(sample))
                assert done.status == 401, (sample.path, done.status)
                assert done.headers["www-authenticate"].startswith("Bearer")
                assert _shape(done.json()) == _shape(malformed.json())

    def test_no_path_is_claimed_twice(self) -> None:
        claims = [(method, route.path) for route in self.api_routes() for method in sorted(route.methods or ())]
        assert len(claims) == len(set(claims))

    def test_documented_examples_work(self) -> None:
        for sample in self.samples():
            done = asyncio.run(_try(self, sample, sample.encode()))
            assert done.status == 200, (sample.path, done.body)

    def test_imports_no_torch(self) -> None:
        module = self.provider_class().__module__
        code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        if "ModuleNotFoundError" in done.stderr and module in done.stderr:
            pytest.skip(f"{module} can be imported by the tests only")
        assert done.returncode == 0, done.stderr or f"importing {module} imports torch or transformers"

    # ---- answers --------------------------------------------------------------------------------------------------

    def test_finished_requests_are_not_aborted(self) -> None:
        async def scene(sample: Sample, body: bytes) -> None:
            client = FakeEngineClient()
            await Exchange(self.make_app(client), "POST", sample.path, body).end()
            assert len(client.finished) == len(client.requests)
            assert client.aborted == []

        for sample in self.generating():
            for way in sample.ways:
                asyncio.run(scene(sample, sample.encode(**way)))

    # ---- bad input ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "body", [b"", b"{", b'{"a": }', b"[1, 2]", b'"text"', b"null", b"\xff\xfe\x00", b"[" * 5000]
    )
    def test_malformed_bodies_are_refused(self, body: bytes) -> None:
        bodies = [(sample, body) for sample in self.samples()]
        for sample, done in asyncio.run(_answers(self, bodies)):
            assert done.status == 400, (sample.path, done.status, done.body)
            assert isinstance(done.json(), dict)

    def test_wrong_types_are_refused_by_name(self) -> None:
        tried = [(sample, field, value) for sample in self.samples() for field, value in sample.body.items()]
        wrong = ["text" if isinstance(value, dict) else {"an": "object"} for _, _, value in tried]
        bodies = [(one, one.encode(**{field: value})) for (one, field, _), value in zip(tried, wrong, strict=True)]
        for (sample, done), (_, field, _) in zip(asyncio.run(_answers(self, bodies)), tried, strict=True):
            assert done.status == 400, (sample.path, field, done.body)
            assert field in json.dumps(done.json()), f"the answer does not name {field!r}: {done.body!r}"

    @pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
    def test_odd_values_are_no_bugs(self, value: bytes) -> None:
        """Refused or, where a field takes anything, served. Deep nesting above all: code that walks through what a
        client sent in recursion must not be surprised.
        """
        tried = [(sample, name) for sample in self.samples() for name in (*sample.fields, *sample.body)]
        bodies = [(sample, sample.with_raw(name, value)) for sample, name in tried]
        for (sample, done), (_, field) in zip(asyncio.run(_answers(self, bodies)), tried, strict=True):
            assert done.status is not None
            assert done.status < 500, f"{sample.path}: {done.status} for {field} = {value[:40]!r}..."

    def test_unknown_and_null_fields_are_tolerated(self) -> None:
        for sample in self.generating():
            done = asyncio.run(_try(self, sample, sample.encode(a_field_of_the_future={"x": 1}, user=None)))
            assert done.status == 200, done.body

    @pytest.mark.parametrize("announce_length", [True, False])
    def test_large_bodies_are_refused(self, announce_length: bool) -> None:
        async def scene(sample: Sample) -> Exchange:
            app = self.make_app(FakeEngineClient(), max_body_bytes=1000)
            body = sample.encode(padding="x" * 2000)
            return await Exchange(app, "POST", sample.path, body, announce_length=announce_length).end()

        for sample in self.samples():
            done = asyncio.run(scene(sample))
            assert done.status == 413, done.body
            done.json()

    def test_errors_have_one_format(self) -> None:
        """Those that never reach a route look like those of the route itself."""

        async def scene(sample: Sample) -> tuple[Exchange, Exchange, Exchange]:
            app = self.make_app(FakeEngineClient(), max_body_bytes=1000)
            malformed = await call(app, "POST", sample.path, b"{")
            return malformed, await call(app, "POST", sample.path, b"x" * 2000), await call(app, "BREW", sample.path)

        for sample in self.samples():
            own, large, method = asyncio.run(scene(sample))
            assert (own.status, large.status, method.status) == (400, 413, 405)
            for other in (large, method):
                assert _shape(own.json()) == _shape(other.json()), (
                    f"{sample.path}: {other.body!r} has another shape than {own.body!r}; "
                    "api_router(errors=...) says how this API writes errors"
                )

    # ---- refusals and failures ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("stream", [False, True])
    def test_refusals_keep_their_status(self, stream: bool) -> None:
        refusal = InvalidRequest("too many cooks", status=429, code="queue_full", param="temperature")
        for sample in self.generating(streams=stream, whole=not stream):
            way = (sample.stream if stream else sample.whole) or {}
            done = asyncio.run(_try(self, sample, sample.encode(**way), refuse=refusal))
            assert done.status == 429, "a refusal is answered with its own status, before any header of a stream"
            assert "too many cooks" in strings(done.json())

    def test_not_ready_is_503(self) -> None:
        async def scene(sample: Sample) -> Exchange:
            client = FakeEngineClient()
            client.is_ready = False
            return await call(self.make_app(client), "POST", sample.path, sample.body)

        for sample in self.generating():
            done = asyncio.run(scene(sample))
            assert done.status == 503, done.body
            done.json()

    @pytest.mark.parametrize("fail_at", [0, 1])
    def test_failure_is_an_error(self, fail_at: int) -> None:
        for sample in self.generating(whole=True):
            done = asyncio.run(_try(self, sample, sample.encode(**(sample.whole or {})), fail_at=fail_at))
            assert done.status is not None
            assert done.status >= 500
            assert FAILURE in strings(done.json())

    @pytest.mark.parametrize("fail_at", [0, 2])
    def test_failure_ends_a_stream_cleanly(self, fail_at: int) -> None:
        """With an error that can be read like all that came before it, and nothing of the text after it."""
        said = f'{FAILURE}: "a \\ quote"\nand a line'
        for sample in self.generating(streams=True):
            done = asyncio.run(self.ask(sample, sample.stream or {}, fail_at=fail_at, failure=said))
            assert done.complete, "the stream does not end"
            assert FAILURE in done.body.decode(), "the stream does not say what went wrong"
            assert "Traceback" not in done.body.decode()
            try:
                found = [one for one in self.read(done) if said in strings(one.data)]
            except Unreadable as error:
                pytest.fail(f"{sample.path}: a stream that fails cannot be read to its end: {error}")
            assert found, f"{sample.path}: no event has the error as it is, {said!r}: {done.body!r}"

    def test_stream_begins_after_acceptance(self) -> None:
        async def scene(sample: Sample) -> None:
            client = FakeEngineClient()
            client.accepting.clear()
            exchange = Exchange(self.make_app(client), "POST", sample.path, sample.encode(**(sample.stream or {})))
            await asyncio.wait_for(client.submitted.wait(), PATIENCE)
            for _ in range(20):
                await asyncio.sleep(0)
            assert exchange.status is None, "headers were sent before the engine accepted the request"
            client.accepting.set()
            assert (await exchange.end()).status == 200

        for sample in self.generating(streams=True):
            asyncio.run(scene(sample))

    # ---- clients that leave ---------------------------------------------------------------------------------------

    def test_leaving_aborts(self) -> None:
        async def scene(sample: Sample) -> None:
            client = FakeEngineClient(stall_at=1)
            way = sample.whole or {}
            exchange = Exchange(self.make_app(client), "POST", sample.path, sample.encode(**way))
            await asyncio.wait_for(client.submitted.wait(), PATIENCE)
            for _ in range(20):
                await asyncio.sleep(0)
            exchange.leave()
            await _ends_by_abort(exchange, client)

        for sample in self.generating():
            asyncio.run(scene(sample))

    def test_leaving_a_stream_aborts(self) -> None:
        async def scene(sample: Sample) -> None:
            client = FakeEngineClient(own_script, stall_at=1)
            exchange = Exchange(self.make_app(client), "POST", sample.path, sample.encode(**(sample.stream or {})))
            await exchange.until(lambda one: mark(0) in one.body)
            exchange.leave()
            await _ends_by_abort(exchange, client)

        for sample in self.generating(streams=True):
            asyncio.run(scene(sample))


def _shape(data: Any) -> Any:
    return {name: _shape(value) for name, value in data.items()} if isinstance(data, dict) else None


async def _try(suite: ApiRouterContract, sample: Sample, body: bytes, **client: Any) -> Exchange:
    return await Exchange(suite.make_app(FakeEngineClient(**client)), "POST", sample.path, body).end()


async def _answers(suite: ApiRouterContract, bodies: Sequence[tuple[Sample, bytes]]) -> list[tuple[Sample, Exchange]]:
    """Return what one app answers to each body, in order. To build an app takes longer than to refuse a body."""
    app = suite.make_app(FakeEngineClient())
    return [(sample, await Exchange(app, "POST", sample.path, body).end()) for sample, body in bodies]


async def _ends_by_abort(exchange: Exchange, client: FakeEngineClient) -> None:
    try:
        await exchange.end()
    except TimeoutError:
        pytest.fail("the request goes on although its client has left")
    assert len(client.aborted) == len(client.requests), "the engine was not told to abort"
